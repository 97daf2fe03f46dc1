// Kernels of compressors/fp4_quant.py: encode, decode and sum, decode and sum and encode.
#include "block.cuh"
#include "fp4_quant.cuh"

namespace megatron_compress {
namespace {

using fp4::Format;
using fp4::GroupScale;
using fp4::Scales;

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;

template <int G>
struct Geometry {
  static constexpr int kRow = G < 64 ? G : 64;  // values a thread holds
  static constexpr int kLanes = G / kRow;       // threads that share a group
};

struct Target {
  uint8_t* codes;
  float *scales, *alphas;
};

__host__ __device__ float norm_of(int block) { return float(1.0 / sqrt(double(block))); }

template <int G>
__device__ float group_factor(const Fp4Payloads& p, int rank, int64_t group, bool dual, float norm) {
  const float scale = reinterpret_cast<const float*>(p.scales.data + rank * p.scales.stride)[group];
  if (!dual) return scale;
  return __fdiv_rn(scale * norm, reinterpret_cast<const float*>(p.alphas.data + rank * p.alphas.stride)[group]);
}

template <int G, int N>
__device__ __forceinline__ void store_group(const GroupScale& s, const uint32_t (&words)[N / 8], uint8_t* shared,
                                            const Target& to, int64_t first_row, int rows, int lane, bool dual) {
  using Codes = WarpRows<N / 2>;
  __syncwarp();
#pragma unroll
  for (int i = 0; i < N / 32; ++i)
    reinterpret_cast<uint4*>(shared + lane * Codes::kStride)[i] =
        make_uint4(words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]);
  Codes::store(shared, [&](int row) { return to.codes + (first_row + row) * (N / 2); }, rows, lane, true);
  constexpr int kLanes = Geometry<G>::kLanes;
  if (lane % kLanes == 0 && lane < rows) {
    to.scales[(first_row + lane) / kLanes] = s.scale;
    if (dual) to.alphas[(first_row + lane) / kLanes] = s.alpha;
  }
}

// The last, shorter group, by a whole block. v: its n values times kHeadroom.
template <Scales kScales>
__device__ void encode_tail(float* v, float* scratch, int n, int64_t group, int64_t first, const Target& to,
                            const Format& f) {
  const int block = n & -n;
  const float norm = norm_of(block);
  hadamard_in_block(v, n, block);
  const float largest = largest_in_block(v, n);
  GroupScale s = fp4::single_scale(largest, block, f);
  if (kScales != Scales::kSingle) {
    for (int i = threadIdx.x; i < n; i += kThreads) scratch[i] = (v[i] * s.inverse) * (v[i] * s.inverse);
    s = fp4::dual_scale<kScales>(s, largest, pairwise_sum_in_block(scratch, n), block, n, norm, f);
  }
  __syncthreads();
  for (int i = threadIdx.x * 8; i < n; i += kThreads * 8) {
    float t[8];
    for (int k = 0; k < 8; ++k)
      t[k] = i + k < n ? (kScales == Scales::kClipped ? saturate(v[i + k] * s.inverse, f.max) : v[i + k] * s.inverse)
                       : 0.0f;
    const uint32_t packed = s.finite ? fp4::quantize_8(t, f) : 0u;
    for (int byte = 0; byte < 4 && i + 2 * byte < n; ++byte)
      to.codes[(first + i) / 2 + byte] = uint8_t(packed >> (8 * byte));
  }
  if (threadIdx.x == 0) {
    to.scales[group] = s.scale;
    if (kScales != Scales::kSingle) to.alphas[group] = s.alpha;
  }
}

// The sum of a tail's decoded payloads into total[0..n).
__device__ void decode_tail(const Fp4Payloads& p, float* v, float* total, int n, int64_t group, int64_t first,
                            bool e3m0, bool dual, float limit) {
  const int block = n & -n;
  for (int rank = 0; rank < p.ranks; ++rank) {
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += kThreads) {
      const int code = p.codes.data[rank * p.codes.stride + (first + i) / 2] >> (i % 2 * 4) & 15;
      const uint32_t bits = e3m0 ? (code & 7) << 10 : (code & 7) << 9;
      const float magnitude = __half2float(__ushort_as_half(uint16_t(bits))) * (e3m0 ? 0x1p12f : 0x1p14f);
      v[i] = code & 8 ? -magnitude : magnitude;
    }
    hadamard_in_block(v, n, block);
    const float factor = group_factor<0>(p, rank, group, dual, norm_of(block));
    for (int i = threadIdx.x; i < n; i += kThreads) {
      const float part = saturate(v[i] * factor, limit);
      total[i] = rank ? total[i] + part : part;
    }
  }
  __syncthreads();
}

// A decoded row, or with kSum the sum of those of all ranks, in rank order.
template <int G, bool kE3M0, bool kSum, int N>
__device__ __forceinline__ void decode_row(const Fp4Payloads& p, float (&total)[N], int64_t row, int lane, bool valid,
                                           bool dual, float norm, float limit) {
  constexpr int kLanes = Geometry<G>::kLanes;
  for (int rank = 0; rank < (kSum ? p.ranks : 1); ++rank) {
    float v[N];
    alignas(16) uint8_t codes[N / 2];
#pragma unroll
    for (int i = 0; i < N / 32; ++i)
      reinterpret_cast<uint4*>(codes)[i] =
          valid ? reinterpret_cast<const uint4*>(p.codes.data + rank * p.codes.stride + row * (N / 2))[i] : uint4{};
    const float factor = valid ? group_factor<G>(p, rank, row / kLanes, dual, norm) : 0.0f;
    fp4::dequantize_row<kE3M0, kLanes>(codes, v, lane);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float part = saturate(v[i] * factor, limit);
      total[i] = kSum && rank ? total[i] + part : part;
    }
  }
}

template <int G, int kItem, Scales kScales>
__global__ void __launch_bounds__(kThreads) encode_kernel(const uint8_t* x, DType dtype, int64_t numel, Target to,
                                                          bool e3m0, bool aligned, int64_t num_rows) {
  constexpr int N = Geometry<G>::kRow, kLanes = Geometry<G>::kLanes;
  using Rows = WarpRows<N * kItem>;
  __shared__ alignas(16) uint8_t shared[kWarps * Rows::kSharedBytes];
  const Format f = fp4::format_of(e3m0);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t block_row = int64_t(blockIdx.x) * kThreads;
  if (block_row >= num_rows) {
    float *v = reinterpret_cast<float*>(shared), *scratch = v + kMaxTail;
    const int64_t first = numel / G * G;
    for (int i = threadIdx.x; i < numel - first; i += kThreads) v[i] = read_item(x, dtype, first + i) * kHeadroom;
    encode_tail<kScales>(v, scratch, int(numel - first), numel / G, first, to, f);
    return;
  }
  const int64_t first_row = block_row + warp * 32;
  const int rows = int(min(int64_t(32), num_rows - first_row));
  if (rows <= 0) return;
  uint8_t* tile = shared + warp * Rows::kSharedBytes;
  Rows::load(tile, [&](int row) { return x + (first_row + row) * (N * kItem); }, rows, lane, aligned);
  float v[N];
  read_row<kItem>(tile + lane * Rows::kStride, dtype, v);
  headroom_and_first_stage<kItem == 2>(v);
  hadamard_in_thread<N, 2>(v);
  hadamard_across_lanes<N, kLanes>(v, lane);
  uint32_t words[N / 8];
  const GroupScale s = fp4::quantize_group<kLanes, kScales>(v, words, norm_of(G), f);
  store_group<G, N>(s, words, tile, to, first_row, rows, lane, kScales != Scales::kSingle);
}

template <int G, int kItem, bool kE3M0, bool kSum>
__global__ void __launch_bounds__(kThreads) decode_kernel(Fp4Payloads p, uint8_t* out, DType dtype, int64_t numel,
                                                          bool dual, bool aligned, int64_t num_rows) {
  constexpr int N = Geometry<G>::kRow;
  using Rows = WarpRows<N * kItem>;
  __shared__ alignas(16) uint8_t shared[kWarps * Rows::kSharedBytes];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t block_row = int64_t(blockIdx.x) * kThreads;
  const float limit = p.ranks == 1 ? largest_finite(dtype) : kFloatMax;
  if (block_row >= num_rows) {
    float *v = reinterpret_cast<float*>(shared), *total = v + kMaxTail;
    const int64_t first = numel / G * G;
    decode_tail(p, v, total, int(numel - first), numel / G, first, kE3M0, dual, limit);
    for (int i = threadIdx.x; i < numel - first; i += kThreads) write_item(out, dtype, first + i, total[i]);
    return;
  }
  const int64_t first_row = block_row + warp * 32;
  const int rows = int(min(int64_t(32), num_rows - first_row));
  if (rows <= 0) return;
  float total[N];
  decode_row<G, kE3M0, kSum>(p, total, first_row + lane, lane, lane < rows, dual, norm_of(G), limit);
  uint8_t* tile = shared + warp * Rows::kSharedBytes;
  write_row<kItem>(tile + lane * Rows::kStride, dtype, total);
  Rows::store(tile, [&](int row) { return out + (first_row + row) * (N * kItem); }, rows, lane, aligned);
}

template <int G, bool kE3M0, Scales kScales>
__global__ void __launch_bounds__(kThreads) requantize_kernel(Fp4Payloads p, DType dtype, int64_t numel, Target to,
                                                              int64_t num_rows) {
  constexpr int N = Geometry<G>::kRow, kLanes = Geometry<G>::kLanes;
  constexpr int kShared = kWarps * WarpRows<N / 2>::kSharedBytes;
  __shared__ alignas(16) uint8_t shared[kShared > 8 * kMaxTail ? kShared : 8 * kMaxTail];
  constexpr bool kDual = kScales != Scales::kSingle;
  const Format f = fp4::format_of(kE3M0);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t block_row = int64_t(blockIdx.x) * kThreads;
  if (block_row >= num_rows) {
    float *v = reinterpret_cast<float*>(shared), *total = v + kMaxTail;
    const int64_t first = numel / G * G;
    const int n = int(numel - first);
    decode_tail(p, v, total, n, numel / G, first, kE3M0, kDual, kFloatMax);
    for (int i = threadIdx.x; i < n; i += kThreads) v[i] = round_to(total[i], dtype) * kHeadroom;
    encode_tail<kScales>(v, total, n, numel / G, first, to, f);
    return;
  }
  const int64_t first_row = block_row + warp * 32;
  const int rows = int(min(int64_t(32), num_rows - first_row));
  if (rows <= 0) return;
  float v[N];
  decode_row<G, kE3M0, true>(p, v, first_row + lane, lane, lane < rows, kDual, norm_of(G), kFloatMax);
#pragma unroll
  for (int i = 0; i < N; ++i) v[i] = round_to(v[i], dtype);
  headroom_and_first_stage<false>(v);
  hadamard_in_thread<N, 2>(v);
  hadamard_across_lanes<N, kLanes>(v, lane);
  uint32_t words[N / 8];
  const GroupScale s = fp4::quantize_group<kLanes, kScales>(v, words, norm_of(G), f);
  store_group<G, N>(s, words, shared + warp * WarpRows<N / 2>::kSharedBytes, to, first_row, rows, lane, kDual);
}

struct Launch {
  int64_t num_rows;
  unsigned blocks;
};

template <int G>
Launch launch_of(int64_t numel) {
  const int64_t rows = numel / G * Geometry<G>::kLanes;
  return {rows, unsigned((rows + kThreads - 1) / kThreads + (numel % G > 0))};
}

// Call f with the group size as a constant.
template <class F>
void with_group(int group_size, F f) {
  switch (group_size) {
    case 32: return f(std::integral_constant<int, 32>());
    case 64: return f(std::integral_constant<int, 64>());
    case 128: return f(std::integral_constant<int, 128>());
    case 256: return f(std::integral_constant<int, 256>());
    case 512: return f(std::integral_constant<int, 512>());
  }
}

template <class F>
void with_scales(const Fp4Settings& s, F f) {
  if (!s.dual) return f(std::integral_constant<Scales, Scales::kSingle>());
  if (!s.paper_clips) return f(std::integral_constant<Scales, Scales::kDual>());
  return f(std::integral_constant<Scales, Scales::kClipped>());
}

template <class F>
void with_bool(bool value, F f) {
  value ? f(std::true_type()) : f(std::false_type());
}

}  // namespace

void fp4_quant_encode(const void* x, DType dtype, int64_t numel, uint8_t* codes, float* scales, float* alphas,
                      Fp4Settings settings, cudaStream_t stream) {
  with_group(settings.group_size, [&](auto group) {
    with_scales(settings, [&](auto mode) {
      with_bool(item_bytes(dtype) == 4, [&](auto wide) {
        constexpr int G = group(), kItem = wide() ? 4 : 2;
        const Launch launch = launch_of<G>(numel);
        encode_kernel<G, kItem, mode()><<<launch.blocks, kThreads, 0, stream>>>(
            static_cast<const uint8_t*>(x), dtype, numel, {codes, scales, alphas}, settings.e3m0, is_aligned_16(x),
            launch.num_rows);
      });
    });
  });
}

void fp4_quant_decode(Fp4Payloads payloads, void* out, DType dtype, int64_t numel, Fp4Settings settings,
                      cudaStream_t stream) {
  with_group(settings.group_size, [&](auto group) {
    with_bool(settings.e3m0, [&](auto e3m0) {
      with_bool(item_bytes(dtype) == 4, [&](auto wide) {
        with_bool(payloads.ranks > 1, [&](auto sum) {
          constexpr int G = group(), kItem = wide() ? 4 : 2;
          const Launch launch = launch_of<G>(numel);
          decode_kernel<G, kItem, e3m0(), sum()><<<launch.blocks, kThreads, 0, stream>>>(
              payloads, static_cast<uint8_t*>(out), dtype, numel, settings.dual, is_aligned_16(out), launch.num_rows);
        });
      });
    });
  });
}

void fp4_quant_requantize(Fp4Payloads payloads, DType dtype, int64_t numel, uint8_t* codes, float* scales,
                          float* alphas, Fp4Settings settings, cudaStream_t stream) {
  with_group(settings.group_size, [&](auto group) {
    with_scales(settings, [&](auto mode) {
      with_bool(settings.e3m0, [&](auto e3m0) {
        constexpr int G = group();
        const Launch launch = launch_of<G>(numel);
        requantize_kernel<G, e3m0(), mode()><<<launch.blocks, kThreads, 0, stream>>>(
            payloads, dtype, numel, {codes, scales, alphas}, launch.num_rows);
      });
    });
  });
}

}  // namespace megatron_compress
