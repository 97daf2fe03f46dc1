// fp4_quant: decode one payload, or the sum of several.
#include "fp4_rows.cuh"

namespace megatron_compress {
namespace fp4 {
namespace {

// Several payloads are added before they are rotated back. A power of two keeps those of huge values in range.
__device__ __forceinline__ float shrink_of(const Fp4Payloads& p, int64_t group, bool dual, float norm) {
  bool huge = false;
  for (int rank = 0; rank < p.ranks; ++rank) huge |= group_factor(p, rank, group, dual, norm) > 1.0f;
  return huge ? kHeadroom : 1.0f;
}

// The sum of a tail's payloads rotated back, by a whole block; one payload is rotated before its factor is applied.
__device__ void decode_tail(const Fp4Payloads& p, float* v, int n, int64_t group, int64_t first, bool e3m0, bool dual,
                            float limit) {
  const float norm = norm_of(n & -n);
  if (p.ranks == 1) {
    const float factor = group_factor(p, 0, group, dual, norm);
    for (int i = threadIdx.x; i < n; i += kThreads) v[i] = code_at(p, 0, first + i, e3m0);
    hadamard_in_block(v, n, n & -n);
    for (int i = threadIdx.x; i < n; i += kThreads) v[i] = saturate(v[i] * factor, limit);
  } else {
    const float shrink = shrink_of(p, group, dual, norm);
    add_tails(p, v, n, group, first, e3m0, dual, shrink);
    hadamard_in_block(v, n, n & -n);
    for (int i = threadIdx.x; i < n; i += kThreads) v[i] *= 1.0f / shrink;
  }
}

// One payload, decoded: rotated, then times its factor.
template <int G, bool kE3M0, int N>
__device__ __forceinline__ void decode_row(const Fp4Payloads& p, float (&v)[N], int64_t row, int lane, bool valid,
                                           bool dual, float norm, float limit) {
  constexpr float kUnit = fp4::kCodeUnit<kE3M0>;
  uint32_t packed[N / 8];
  const float factor = load_row<G, N>(p, 0, row, valid, dual, norm, packed);
  fp4::transform_codes<kE3M0, Geometry<G>::kLanes>(packed, v, lane);
  if (factor * (16.0f * G) > limit || factor > 0x1p100f) {  // might leave the range
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] = saturate((v[i] * (1.0f / kUnit)) * factor, limit);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] *= factor * (1.0f / kUnit);
  }
}

// Several, added and then rotated.
template <int G, bool kE3M0, int N>
__device__ __forceinline__ void decode_rows(const Fp4Payloads& p, float (&v)[N], int64_t row, int lane, bool valid,
                                            bool dual, float norm) {
  constexpr int kLanes = Geometry<G>::kLanes;
  const float shrink = valid ? shrink_of(p, row / kLanes, dual, norm) : 1.0f;
  add_rows<G, kE3M0>(p, v, row, valid, dual, norm, shrink);
  hadamard_in_thread<N>(v);
  hadamard_across_lanes<N, kLanes>(v, lane);
#pragma unroll
  for (int i = 0; i < N; ++i) v[i] *= 1.0f / shrink;
}

template <int G, int kItem, bool kE3M0, bool kSum>
__global__ void __launch_bounds__(kThreads) decode_kernel(Fp4Payloads p, uint8_t* out, DType dtype, int64_t numel,
                                                          bool dual, bool aligned, int64_t num_rows) {
  constexpr int N = Geometry<G>::kRow;
  using Rows = WarpRows<N * kItem>;
  __shared__ alignas(16) uint8_t shared[kWarps * Rows::kSharedBytes];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t block_row = int64_t(blockIdx.x) * kThreads;
  if (block_row >= num_rows) {
    float* v = reinterpret_cast<float*>(shared);
    const int64_t first = numel / G * G;
    decode_tail(p, v, int(numel - first), numel / G, first, kE3M0, dual, largest_finite(dtype));
    for (int i = threadIdx.x; i < numel - first; i += kThreads) write_item(out, dtype, first + i, v[i]);
    return;
  }
  const int64_t first_row = block_row + warp * 32;
  const int rows = int(min(int64_t(32), num_rows - first_row));
  if (rows <= 0) return;
  float v[N];
  if constexpr (kSum) {
    decode_rows<G, kE3M0>(p, v, first_row + lane, lane, lane < rows, dual, norm_of(G));
  } else {
    decode_row<G, kE3M0>(p, v, first_row + lane, lane, lane < rows, dual, norm_of(G), largest_finite(dtype));
  }
  uint8_t* tile = shared + warp * Rows::kSharedBytes;
  write_row<kItem>(tile + lane * Rows::kStride, dtype, v);
  Rows::store_dense(tile, out + first_row * (N * kItem), rows, lane, aligned);
}

}  // namespace
}  // namespace fp4

void fp4_quant_decode(Fp4Payloads payloads, void* out, DType dtype, int64_t numel, Fp4Settings settings,
                      cudaStream_t stream) {
  fp4::with_group(settings.group_size, [&](auto group) {
    fp4::with_bool(settings.e3m0, [&](auto e3m0) {
      fp4::with_bool(item_bytes(dtype) == 4, [&](auto wide) {
        fp4::with_bool(payloads.ranks > 1, [&](auto sum) {
          constexpr int G = group(), kItem = wide() ? 4 : 2;
          const fp4::Launch launch = fp4::launch_of<G>(numel);
          fp4::decode_kernel<G, kItem, e3m0(), sum()><<<launch.blocks, fp4::kThreads, 0, stream>>>(
              payloads, static_cast<uint8_t*>(out), dtype, numel, settings.dual, is_aligned_16(out), launch.num_rows);
        });
      });
    });
  });
}

}  // namespace megatron_compress
