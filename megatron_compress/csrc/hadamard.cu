// The standalone grouped transform (ops/hadamard.py): 16 bytes a load, eight values a thread, the rest by shuffles.
#include "scaled_codes.cuh"

namespace megatron_compress {
namespace {

constexpr int kThreads = 256;
constexpr int kUnroll = 2;

// Groups of eight elements lie within a thread; of 16 to 256, in kLanes neighbours; of 512, in a warp twice.
template <int kLanes, bool kTwice>
__global__ void __launch_bounds__(kThreads) hadamard_kernel(const void* x, void* out, DType dtype, int64_t chunks,
                                                            float scale, bool aligned) {
  const int lane = threadIdx.x % 32;
  const float limit = largest_finite(dtype);
  const int64_t first = (int64_t(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32) * 32 * kUnroll + lane;
  float v[kUnroll][8];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) load_chunk(x, dtype, first + u * 32, first + u * 32 < chunks ? 8 : 0, aligned, v[u]);
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
    for (int distance = 1; distance < 8; distance *= 2) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (i & distance) continue;
        const float a = v[u][i], b = v[u][i + distance];
        v[u][i] = a + b;
        v[u][i + distance] = a - b;
      }
    }
    hadamard_across_lanes<8, kLanes>(v[u], lane);
  }
  if (kTwice) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float a = v[0][i], b = v[1][i];
      v[0][i] = a + b;
      v[1][i] = a - b;
    }
  }
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
    for (int i = 0; i < 8; ++i) v[u][i] = saturate(v[u][i] * scale, limit);
    if (first + u * 32 < chunks) store_chunk(out, dtype, first + u * 32, 8, aligned, v[u]);
  }
}

}  // namespace

void hadamard(const void* x, void* out, DType dtype, int64_t numel, int group_size, float scale, cudaStream_t stream) {
  const int64_t chunks = numel / 8;
  const unsigned blocks = unsigned((chunks + kThreads * kUnroll - 1) / (kThreads * kUnroll));
  const bool aligned = is_aligned_16(x) && is_aligned_16(out);
  const auto launch = [&](auto kernel) {
    kernel<<<blocks, kThreads, 0, stream>>>(x, out, dtype, chunks, scale, aligned);
  };
  switch (group_size / 8) {
    case 1: return launch(hadamard_kernel<1, false>);
    case 2: return launch(hadamard_kernel<2, false>);
    case 4: return launch(hadamard_kernel<4, false>);
    case 8: return launch(hadamard_kernel<8, false>);
    case 16: return launch(hadamard_kernel<16, false>);
    case 32: return launch(hadamard_kernel<32, false>);
    case 64: return launch(hadamard_kernel<32, true>);
  }
}

}  // namespace megatron_compress
