// fp4_quant: encode (compressors/fp4_quant.py).
#include "fp4_rows.cuh"

namespace megatron_compress {
namespace fp4 {
namespace {

template <int G, int kItem, Scales kScales>
__global__ void __launch_bounds__(kThreads) encode_kernel(const uint8_t* x, DType dtype, int64_t numel, Target to,
                                                          bool e3m0, bool aligned, int64_t num_rows) {
  constexpr int N = Geometry<G>::kRow, kLanes = Geometry<G>::kLanes;
  using Rows = WarpRows<N * kItem>;
  __shared__ alignas(16) uint8_t shared[kWarps * Rows::kSharedBytes];
  const Format f = format_of(e3m0);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t block_row = int64_t(blockIdx.x) * kThreads;
  if (block_row >= num_rows) {
    float *v = reinterpret_cast<float*>(shared), *scratch = v + kMaxTail;
    const int64_t first = numel / G * G;
    const int n = int(numel - first);
    for (int i = threadIdx.x; i < n; i += kThreads) v[i] = read_item(x, dtype, first + i) * kHeadroom;
    hadamard_in_block(v, n, n & -n);
    encode_tail<kScales>(v, scratch, n, numel / G, first, to, f);
    return;
  }
  const int64_t first_row = block_row + warp * 32;
  const int rows = int(min(int64_t(32), num_rows - first_row));
  if (rows <= 0) return;
  uint8_t* tile = shared + warp * Rows::kSharedBytes;
  Rows::load_dense(tile, x + first_row * (N * kItem), rows, lane, aligned);
  float v[N];
  read_row<kItem>(tile + lane * Rows::kStride, dtype, v);
  headroom_and_first_stage<kItem == 2>(v);
  hadamard_in_thread<N, 2>(v);
  hadamard_across_lanes<N, kLanes>(v, lane);
  uint32_t words[N / 8];
  const GroupScale s = quantize_group<kLanes, kScales>(v, words, norm_of(G), f);
  store_group<G, N>(s, words, tile, to, first_row, rows, lane, kScales != Scales::kSingle);
}

}  // namespace
}  // namespace fp4

void fp4_quant_encode(const void* x, DType dtype, int64_t numel, uint8_t* codes, float* scales, float* alphas,
                      Fp4Settings settings, cudaStream_t stream) {
  fp4::with_group(settings.group_size, [&](auto group) {
    fp4::with_scales(settings, [&](auto mode) {
      fp4::with_bool(item_bytes(dtype) == 4, [&](auto wide) {
        constexpr int G = group(), kItem = wide() ? 4 : 2;
        const fp4::Launch launch = fp4::launch_of<G>(numel);
        fp4::encode_kernel<G, kItem, mode()><<<launch.blocks, fp4::kThreads, 0, stream>>>(
            static_cast<const uint8_t*>(x), dtype, numel, {codes, scales, alphas}, settings.e3m0, is_aligned_16(x),
            launch.num_rows);
      });
    });
  });
}

}  // namespace megatron_compress
