// fp4_quant: the payload of the sum of several.
#include "fp4_rows.cuh"

namespace megatron_compress {
namespace fp4 {
namespace {

// The sum stays rotated: transforming it back and forth would only multiply it by the block's length.
template <int G, bool kE3M0, Scales kScales>
__global__ void __launch_bounds__(kThreads) requantize_kernel(Fp4Payloads p, int64_t numel, Target to,
                                                              int64_t num_rows) {
  constexpr int N = Geometry<G>::kRow;
  constexpr int kShared = kWarps * WarpRows<N / 2>::kSharedBytes;
  __shared__ alignas(16) uint8_t shared[kShared > 8 * kMaxTail ? kShared : 8 * kMaxTail];
  constexpr bool kDual = kScales != Scales::kSingle;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t block_row = int64_t(blockIdx.x) * kThreads;
  if (block_row >= num_rows) {
    float *v = reinterpret_cast<float*>(shared), *scratch = v + kMaxTail;
    const int64_t first = numel / G * G;
    const int n = int(numel - first);
    const Weights<kE3M0> weights(p, numel / G, kDual, norm_of(n & -n), true);
    add_tails(p, v, n, numel / G, first, kDual, weights);
    encode_tail<kE3M0, kScales>(v, scratch, n, numel / G, first, to, weights.growth, weights.unit);
    return;
  }
  const int64_t first_row = block_row + warp * 32, row = first_row + lane;
  const int rows = int(min(int64_t(32), num_rows - first_row));
  if (rows <= 0) return;
  const float norm = norm_of(G);
  const Weights<kE3M0> weights(p, row / Geometry<G>::kLanes, kDual, norm, lane < rows);
  __half2 w[N / 2];
  add_rows<G, kE3M0, N>(p, row, lane < rows, kDual, norm, weights, w);
  uint32_t codes[N / 8];
  const GroupScale s =
      quantize_group<kE3M0, Geometry<G>::kLanes, kScales, N>(w, codes, weights.growth, weights.unit, norm);
  store_group<G, N>(s, codes, shared + warp * WarpRows<N / 2>::kSharedBytes, to, first_row, rows, lane, kDual);
}

}  // namespace
}  // namespace fp4

void fp4_quant_requantize(Fp4Payloads payloads, int64_t numel, uint8_t* codes, float* scales, float* alphas,
                          Fp4Settings settings, cudaStream_t stream) {
  fp4::with_group(settings.group_size, [&](auto group) {
    fp4::with_scales(settings, [&](auto mode) {
      fp4::with_bool(settings.e3m0, [&](auto e3m0) {
        constexpr int G = group();
        const fp4::Launch launch = fp4::launch_of<G>(numel);
        fp4::requantize_kernel<G, e3m0(), mode()><<<launch.blocks, fp4::kThreads, 0, stream>>>(
            payloads, numel, {codes, scales, alphas}, launch.num_rows);
      });
    });
  });
}

}  // namespace megatron_compress
