// fp4_quant: encode (compressors/fp4_quant.py).
#include "fp4_rows.cuh"

namespace megatron_compress {
namespace fp4 {
namespace {

// Warps walk over the tensor; while they quantize 32 rows, the next are on their way.
template <int G, int kItem, Scales kScales>
__global__ void __launch_bounds__(kThreads) encode_kernel(const uint8_t* x, DType dtype, int64_t numel, Target to,
                                                          bool e3m0, bool aligned, int64_t num_rows) {
  constexpr int N = Geometry<G>::kRow, kLanes = Geometry<G>::kLanes;
  using Rows = WarpRows<N * kItem>;
  extern __shared__ __align__(16) uint8_t shared[];
  const Format f = format_of(e3m0);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (blockIdx.x == gridDim.x - 1 && numel % G) {
    float *v = reinterpret_cast<float*>(shared), *scratch = v + kMaxTail;
    const int64_t first = numel / G * G;
    const int n = int(numel - first);
    for (int i = threadIdx.x; i < n; i += kThreads) v[i] = read_item(x, dtype, first + i) * kHeadroom;
    hadamard_in_block(v, n, n & -n);
    encode_tail<kScales>(v, scratch, n, numel / G, first, to, f);
    return;
  }
  const int64_t stride = int64_t(gridDim.x - (numel % G > 0)) * kThreads;
  uint8_t* tile = shared + warp * 2 * Rows::kSharedBytes;
  const auto start = [&](int64_t row, int buffer) {
    const int rows = int(max(int64_t(0), min(int64_t(32), num_rows - row)));
    Rows::start_dense(tile + buffer * Rows::kSharedBytes, x + row * (N * kItem), rows, lane, aligned);
    end_copy_group();
  };
  int64_t row = int64_t(blockIdx.x) * kThreads + warp * 32;
  start(row, 0);
  for (int buffer = 0; row < num_rows; row += stride, buffer ^= 1) {
    start(row + stride, buffer ^ 1);
    wait_for_all_but_one();
    __syncwarp();
    uint8_t* current = tile + buffer * Rows::kSharedBytes;
    float v[N];
    read_row<kItem>(current + lane * Rows::kStride, dtype, v);
    headroom_and_first_stage<kItem == 2>(v);
    hadamard_in_thread<N, 2>(v);
    hadamard_across_lanes<N, kLanes>(v, lane);
    uint32_t words[N / 8];
    const GroupScale s = quantize_group<kLanes, kScales>(v, words, norm_of(G), f);
    const int rows = int(min(int64_t(32), num_rows - row));
    store_group<G, N>(s, words, current, to, row, rows, lane, kScales != Scales::kSingle);
  }
  wait_for_copies();
}

// As many blocks as fit at once, or fewer, so that all walk over as many tiles.
template <class Kernel>
unsigned blocks_in_step(Kernel kernel, int64_t num_rows, int shared) {
  int device, processors, resident;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, kThreads, shared);
  const int64_t needed = (num_rows + kThreads - 1) / kThreads, most = int64_t(processors) * resident;
  const int64_t turns = (needed + most - 1) / most;
  return unsigned(turns ? (needed + turns - 1) / turns : 0);
}

}  // namespace
}  // namespace fp4

void fp4_quant_encode(const void* x, DType dtype, int64_t numel, uint8_t* codes, float* scales, float* alphas,
                      Fp4Settings settings, cudaStream_t stream) {
  fp4::with_group(settings.group_size, [&](auto group) {
    fp4::with_scales(settings, [&](auto mode) {
      fp4::with_bool(item_bytes(dtype) == 4, [&](auto wide) {
        constexpr int G = group(), kItem = wide() ? 4 : 2;
        const auto kernel = fp4::encode_kernel<G, kItem, mode()>;
        const int64_t num_rows = fp4::launch_of<G>(numel).num_rows;
        const int shared = fp4::kWarps * 2 * WarpRows<fp4::Geometry<G>::kRow * kItem>::kSharedBytes;
        const unsigned blocks = fp4::blocks_in_step(kernel, num_rows, shared) + (numel % G > 0);
        kernel<<<blocks, fp4::kThreads, shared, stream>>>(static_cast<const uint8_t*>(x), dtype, numel,
                                                          {codes, scales, alphas}, settings.e3m0, is_aligned_16(x),
                                                          num_rows);
      });
    });
  });
}

}  // namespace megatron_compress
