// The standalone grouped transform (ops/hadamard.py): 16 bytes a load, eight values a chunk, several chunks a thread.
#include "scaled_codes.cuh"

namespace megatron_compress {
namespace {

constexpr int kThreads = 256;
constexpr int kChunks = 4;  // a thread's

// A group of kLanes * kHeld chunks lies in kLanes neighbouring threads, chunk h * kLanes + l in lane l, so that their
// loads are neighbours; a thread has chunks of kChunks / kHeld groups.
template <int kLanes, int kHeld>
__global__ void __launch_bounds__(kThreads) hadamard_kernel(const void* x, void* out, DType dtype, int64_t chunks,
                                                            float scale, bool aligned) {
  constexpr int kGroups = kChunks / kHeld, kGroupsAWarp = 32 / kLanes;
  const int lane = threadIdx.x % 32;
  const float limit = largest_finite(dtype);
  const int64_t warp = int64_t(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;
  const int64_t first = warp * (32 * kChunks) + lane / kLanes * (kLanes * kHeld) + lane % kLanes;
  const auto chunk = [&](int g, int h) { return first + g * (kGroupsAWarp * kLanes * kHeld) + h * kLanes; };
  float v[kGroups][kHeld * 8];
#pragma unroll
  for (int i = 0; i < kChunks; ++i) {
    const int g = i / kHeld, h = i % kHeld;
    load_chunk(x, dtype, chunk(g, h), chunk(g, h) < chunks ? 8 : 0, aligned,
               *reinterpret_cast<float(*)[8]>(v[g] + h * 8));
  }
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
#pragma unroll
    for (int h = 0; h < kHeld; ++h) {
      auto& part = *reinterpret_cast<float(*)[8]>(v[g] + h * 8);
      hadamard_in_thread<8>(part);
      hadamard_across_lanes<8, kLanes>(part, lane);
    }
    hadamard_in_thread<kHeld * 8, 8>(v[g]);
#pragma unroll
    for (int i = 0; i < kHeld * 8; ++i) v[g][i] = saturate(v[g][i] * scale, limit);
#pragma unroll
    for (int h = 0; h < kHeld; ++h)
      if (chunk(g, h) < chunks)
        store_chunk(out, dtype, chunk(g, h), 8, aligned, *reinterpret_cast<float(*)[8]>(v[g] + h * 8));
  }
}

}  // namespace

void hadamard(const void* x, void* out, DType dtype, int64_t numel, int group_size, float scale, cudaStream_t stream) {
  const int64_t chunks = numel / 8;
  const unsigned blocks = blocks_of(chunks, kThreads * kChunks);
  const bool aligned = is_aligned_16(x) && is_aligned_16(out);
  const auto launch = [&](auto kernel) {
    kernel<<<blocks, kThreads, 0, stream>>>(x, out, dtype, chunks, scale, aligned);
  };
  switch (group_size) {
    case 8: return launch(hadamard_kernel<1, 1>);
    case 16: return launch(hadamard_kernel<2, 1>);
    case 32: return launch(hadamard_kernel<2, 2>);
    case 64: return launch(hadamard_kernel<4, 2>);
    case 128: return launch(hadamard_kernel<4, 4>);
    case 256: return launch(hadamard_kernel<8, 4>);
    case 512: return launch(hadamard_kernel<16, 4>);
  }
}

}  // namespace megatron_compress
