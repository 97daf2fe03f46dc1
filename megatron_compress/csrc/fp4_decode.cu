// fp4_quant: decode one payload, or the sum of several, which are added before they are rotated back.
#include "fp4_rows.cuh"

namespace megatron_compress {
namespace fp4 {
namespace {

// The sum of a tail's payloads rotated back, by a whole block, into v.
template <bool kE3M0>
__device__ void decode_tail(const Fp4Payloads& p, float* v, int n, int64_t group, int64_t first, bool dual,
                            float limit) {
  const float norm = norm_of(n & -n);
  if (p.ranks == 1) {
    const float factor = group_factor(p, 0, group, dual, norm);
    for (int i = threadIdx.x; i < n; i += kThreads) v[i] = code_at<kE3M0>(p, 0, first + i);
    hadamard_in_block<true>(v, n, n & -n);
    for (int i = threadIdx.x; i < n; i += kThreads)
      v[i] = saturate((v[i] * (1.0f / Format<kE3M0>::kUnit)) * factor, limit);
  } else {
    const Weights<kE3M0> weights(p, group, dual, norm, true);
    add_tails(p, v, n, group, first, dual, weights);
    hadamard_in_block<true>(v, n, n & -n);
    for (int i = threadIdx.x; i < n; i += kThreads) v[i] = (v[i] * weights.growth) * weights.unit.value();
  }
}

// A lane's rotated values times growth and unit into its row, eight at a time; kSaturate: those beyond the limit.
template <int kItem, bool kSaturate, int N>
__device__ __forceinline__ void write_values(const __half2 (&w)[N / 2], float growth, float unit, float limit,
                                             uint8_t* row, DType dtype) {
#pragma unroll
  for (int b = 0; b < N / 8; ++b) {
    float v[8];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 pair = __half22float2(w[4 * b + j]);
      v[j] = (pair.x * growth) * unit;
      v[j + 4] = (pair.y * growth) * unit;
    }
    if (kSaturate) {
#pragma unroll
      for (int i = 0; i < 8; ++i) v[i] = saturate(v[i], limit);
    }
    write_row<kItem>(row + b * 8 * kItem, dtype, v);
  }
}

template <int G, int kItem, bool kE3M0, bool kSum>
__global__ void __launch_bounds__(kThreads) decode_kernel(Fp4Payloads p, uint8_t* out, DType dtype, int64_t numel,
                                                          bool dual, bool aligned, int64_t num_rows) {
  constexpr int N = Geometry<G>::kRow, kLanes = Geometry<G>::kLanes;
  using Rows = WarpRows<N * kItem>;
  __shared__ alignas(16) uint8_t shared[kWarps * Rows::kSharedBytes];
  const float limit = largest_finite(dtype);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t block_row = int64_t(blockIdx.x) * kThreads;
  if (block_row >= num_rows) {
    float* v = reinterpret_cast<float*>(shared);
    const int64_t first = numel / G * G;
    decode_tail<kE3M0>(p, v, int(numel - first), numel / G, first, dual, limit);
    for (int i = threadIdx.x; i < numel - first; i += kThreads) write_item(out, dtype, first + i, v[i]);
    return;
  }
  const int64_t first_row = block_row + warp * 32, row = first_row + lane;
  const int rows = int(min(int64_t(32), num_rows - first_row));
  if (rows <= 0) return;
  const bool valid = lane < rows;
  const float norm = norm_of(G);
  uint8_t* tile = shared + warp * Rows::kSharedBytes;
  uint8_t* mine = tile + lane * Rows::kStride;
  __half2 w[N / 2];
  if constexpr (kSum) {
    const Weights<kE3M0> weights(p, row / kLanes, dual, norm, valid);
    add_rows<G, kE3M0, N>(p, row, valid, dual, norm, weights, w);
    transform<N>(w);
    transform_across_lanes<kLanes>(w, lane);
    write_values<kItem, false, N>(w, weights.growth, weights.unit.value(), limit, mine, dtype);
  } else {
    const float factor = valid ? group_factor(p, 0, row / kLanes, dual, norm) : 0.0f;
    add_row<kE3M0, N>(p, 0, row, valid, __float2half_rn(1.0f), w);
    transform<N>(w);
    transform_across_lanes<kLanes>(w, lane);
    constexpr float kGrowth = 1.0f / Format<kE3M0>::kUnit;
    if (factor * (16.0f * G) <= limit && factor <= 0x1p100f) {
      write_values<kItem, false, N>(w, 1.0f, factor * kGrowth, limit, mine, dtype);
    } else {
      write_values<kItem, true, N>(w, kGrowth, factor, limit, mine, dtype);
    }
  }
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
