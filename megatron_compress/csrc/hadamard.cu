// The standalone grouped transform (ops/hadamard.py): 16 bytes a load, eight values a chunk, several chunks a thread.
#include "scaled_codes.cuh"

namespace megatron_compress {
namespace {

constexpr int kThreads = 256;
constexpr int kChunks = 4;  // a thread's

// Two floats as 16-bit ones; what is beyond their range becomes the largest of them.
__device__ __forceinline__ uint32_t pack_saturated(float low, float high, DType dtype) {
  uint32_t pair;
  if (dtype == DType::kBFloat16) {
    asm("cvt.rn.satfinite.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  }
  return pair;
}

__device__ __forceinline__ void store_saturated(void* out, DType dtype, int64_t chunk, bool aligned, float (&v)[8]) {
  if (aligned && dtype != DType::kFloat32) {
    static_cast<uint4*>(out)[chunk] =
        make_uint4(pack_saturated(v[0], v[1], dtype), pack_saturated(v[2], v[3], dtype),
                   pack_saturated(v[4], v[5], dtype), pack_saturated(v[6], v[7], dtype));
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = saturate(v[i], largest_finite(dtype));
    store_chunk(out, dtype, chunk, 8, aligned, v);
  }
}

// A group of kLanes * kHeld chunks lies in kLanes neighbouring threads, chunk h * kLanes + l in lane l, so that their
// loads are neighbours; a thread has chunks of kChunks / kHeld groups.
template <int kLanes, int kHeld>
__global__ void __launch_bounds__(kThreads) hadamard_kernel(const void* x, void* out, DType dtype, int64_t chunks,
                                                            float scale, bool aligned) {
  constexpr int kGroups = kChunks / kHeld, kGroupsAWarp = 32 / kLanes;
  const int lane = threadIdx.x % 32;
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
    for (int i = 0; i < kHeld * 8; ++i) v[g][i] *= scale;
#pragma unroll
    for (int h = 0; h < kHeld; ++h)
      if (chunk(g, h) < chunks)
        store_saturated(out, dtype, chunk(g, h), aligned, *reinterpret_cast<float(*)[8]>(v[g] + h * 8));
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
    case 64: return launch(hadamard_kernel<2, 4>);
    case 128: return launch(hadamard_kernel<4, 4>);
    case 256: return launch(hadamard_kernel<8, 4>);
    case 512: return launch(hadamard_kernel<16, 4>);
  }
}

}  // namespace megatron_compress
