// The standalone grouped transform (ops/hadamard.py): eight values a thread, a chunk, the rest by shuffles. Little work a
// thread and many threads keep memory busiest.
#include "scaled_codes.cuh"

namespace megatron_compress {
namespace {

constexpr int kThreads = 128;

// A group of kLanes * kHeld chunks lies in kLanes neighbouring threads, chunk h * kLanes + l in lane l.
template <int kLanes, int kHeld>
__global__ void __launch_bounds__(kThreads) hadamard_kernel(const void* x, void* out, DType dtype, int64_t chunks,
                                                            float scale, bool aligned) {
  const int lane = threadIdx.x % 32;
  const int64_t thread = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t first = thread / kLanes * (kLanes * kHeld) + lane % kLanes;
  const float limit = largest_finite(dtype);
  float v[kHeld][8];
#pragma unroll
  for (int h = 0; h < kHeld; ++h) {
    load_chunk(x, dtype, first + h * kLanes, first + h * kLanes < chunks ? 8 : 0, aligned, v[h]);
    hadamard_in_thread<8>(v[h]);
    hadamard_across_lanes<8, kLanes>(v[h], lane);
  }
  if constexpr (kHeld == 2) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float a = v[0][i], b = v[1][i];
      v[0][i] = a + b;
      v[1][i] = a - b;
    }
  }
#pragma unroll
  for (int h = 0; h < kHeld; ++h) {
#pragma unroll
    for (int i = 0; i < 8; ++i) v[h][i] = saturate(v[h][i] * scale, limit);
    if (first + h * kLanes < chunks) store_chunk(out, dtype, first + h * kLanes, 8, aligned, v[h]);
  }
}

}  // namespace

void hadamard(const void* x, void* out, DType dtype, int64_t numel, int group_size, float scale, cudaStream_t stream) {
  const bool aligned = is_aligned_16(x) && is_aligned_16(out);
  const auto launch = [&](auto kernel, int held) {
    kernel<<<blocks_of(numel, 8 * kThreads * held), kThreads, 0, stream>>>(x, out, dtype, numel / 8, scale, aligned);
  };
  switch (group_size) {
    case 8: return launch(hadamard_kernel<1, 1>, 1);
    case 16: return launch(hadamard_kernel<2, 1>, 1);
    case 32: return launch(hadamard_kernel<4, 1>, 1);
    case 64: return launch(hadamard_kernel<8, 1>, 1);
    case 128: return launch(hadamard_kernel<16, 1>, 1);
    case 256: return launch(hadamard_kernel<32, 1>, 1);
    case 512: return launch(hadamard_kernel<32, 2>, 2);
  }
}

}  // namespace megatron_compress
