// fp4_quant: encode (compressors/fp4_quant.py).
#include "fp4_rows.cuh"

namespace megatron_compress {
namespace fp4 {
namespace {

// Largest magnitude of 16 bytes of a row, as bits of one or two values, and of what came before. Integers order finite
// values, infinities and NaN.
template <int kItem>
__device__ __forceinline__ uint32_t larger_bits(uint4 bits, uint32_t largest) {
  const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
  for (int i = 0; i < 4; ++i)
    largest = kItem == 4 ? max(largest, words[i] & 0x7fffffffu) : __vmaxu2(largest, words[i] & 0x7fff7fffu);
  return largest;
}

template <int kItem>
__device__ __forceinline__ float magnitude_of(uint32_t bits, DType dtype) {
  if (kItem == 4) return __uint_as_float(bits);
  const uint32_t most = max(bits & 0xffffu, bits >> 16);
  return dtype == DType::kBFloat16 ? __uint_as_float(most << 16) : __half2float(__ushort_as_half(uint16_t(most)));
}

// A lane's row in half precision: times over unit and the block's length.
template <int G, int kItem, int N>
__device__ __forceinline__ Power read_group(const uint8_t* row, DType dtype, __half2 (&w)[N / 2]) {
  constexpr int kLanes = Geometry<G>::kLanes;
  uint32_t bits = 0;
#pragma unroll
  for (int i = 0; i < N * kItem / 16; ++i) bits = larger_bits<kItem>(reinterpret_cast<const uint4*>(row)[i], bits);
  const Power unit(max_across_lanes<kLanes>(max_nan(magnitude_of<kItem>(bits, dtype), kMinPeak)));
  const float shrink = unit.twice_inverse() * (0.5f / G);
#pragma unroll
  for (int b = 0; b < N / 8; ++b) {
    float v[8];
    read_row<kItem>(row + b * 8 * kItem, dtype, v);
#pragma unroll
    for (int j = 0; j < 4; ++j) w[4 * b + j] = __floats2half2_rn(v[j] * shrink, v[j + 4] * shrink);
  }
  return unit;
}

template <bool kE3M0, Scales kScales>
__device__ void encode_short(const void* x, DType dtype, int n, int64_t group, int64_t first, const Target& to, float* v,
                             float* scratch) {
  const int block = n & -n;
  for (int i = threadIdx.x; i < n; i += kThreads) v[i] = read_item(x, dtype, first + i);
  const Power unit(max_nan(largest_in_block(v, n), kMinPeak));
  __syncthreads();
  for (int i = threadIdx.x; i < n; i += kThreads) v[i] = round_half(v[i] * (unit.twice_inverse() * (0.5f / block)));
  hadamard_in_block<true>(v, n, block);
  encode_tail<kE3M0, kScales>(v, scratch, n, group, first, to, 1.0f, unit);
}

template <int G, int kItem, bool kE3M0, Scales kScales>
__global__ void __launch_bounds__(kThreads) encode_kernel(const uint8_t* x, DType dtype, int64_t numel, Target to,
                                                          bool aligned, int64_t num_rows) {
  constexpr int N = Geometry<G>::kRow, kLanes = Geometry<G>::kLanes;
  using Rows = WarpRows<N * kItem>;
  __shared__ alignas(16) uint8_t shared[kWarps * Rows::kSharedBytes];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t block_row = int64_t(blockIdx.x) * kThreads;
  if (block_row >= num_rows) {
    float* v = reinterpret_cast<float*>(shared);
    const int64_t first = numel / G * G;
    return encode_short<kE3M0, kScales>(x, dtype, int(numel - first), numel / G, first, to, v, v + kMaxTail);
  }
  const int64_t first_row = block_row + warp * 32;
  const int rows = int(min(int64_t(32), num_rows - first_row));
  if (rows <= 0) return;
  uint8_t* tile = shared + warp * Rows::kSharedBytes;
  Rows::load_dense(tile, x + first_row * (N * kItem), rows, lane, aligned);
  __half2 w[N / 2];
  const Power unit = read_group<G, kItem, N>(tile + lane * Rows::kStride, dtype, w);
  transform<N>(w);
  transform_across_lanes<kLanes>(w, lane);
  uint32_t codes[N / 8];
  const GroupScale s = quantize_group<kE3M0, kLanes, kScales, N>(w, codes, 1.0f, unit, norm_of(G));
  store_group<G, N>(s, codes, tile, to, first_row, rows, lane, kScales != Scales::kSingle);
}

}  // namespace
}  // namespace fp4

void fp4_quant_encode(const void* x, DType dtype, int64_t numel, uint8_t* codes, float* scales, float* alphas,
                      Fp4Settings settings, cudaStream_t stream) {
  fp4::with_group(settings.group_size, [&](auto group) {
    fp4::with_scales(settings, [&](auto mode) {
      fp4::with_bool(settings.e3m0, [&](auto e3m0) {
        fp4::with_bool(item_bytes(dtype) == 4, [&](auto wide) {
          constexpr int G = group(), kItem = wide() ? 4 : 2;
          const fp4::Launch launch = fp4::launch_of<G>(numel);
          fp4::encode_kernel<G, kItem, e3m0(), mode()><<<launch.blocks, fp4::kThreads, 0, stream>>>(
              static_cast<const uint8_t*>(x), dtype, numel, {codes, scales, alphas}, is_aligned_16(x), launch.num_rows);
        });
      });
    });
  });
}

}  // namespace megatron_compress
