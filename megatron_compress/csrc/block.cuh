// One block works on the few values of a tail in shared memory: the same order of operations, any length.
#pragma once

#include "numeric.cuh"

namespace megatron_compress {

constexpr int kMaxTail = 512;

__device__ __forceinline__ float round_half(float x) { return __half2float(__float2half_rn(x)); }

// In place, blocks of `block` (a power of two that divides n); kHalf: in half precision.
template <bool kHalf = false>
__device__ inline void hadamard_in_block(float* v, int n, int block) {
  for (int distance = 1; distance < block; distance *= 2) {
    __syncthreads();
    for (int pair = threadIdx.x; pair < n / 2; pair += blockDim.x) {
      const int i = pair / distance * 2 * distance + pair % distance;
      const float a = v[i], b = v[i + distance];
      v[i] = kHalf ? round_half(a + b) : a + b;
      v[i + distance] = kHalf ? round_half(a - b) : a - b;
    }
  }
  __syncthreads();
}

// Sum of v[0..n) by the tree of adjacent pairs; destroys v (n at most kMaxTail, blockDim.x at least kMaxTail / 4).
__device__ inline float pairwise_sum_in_block(float* v, int n) {
  while (n > 1) {
    const int half = (n + 1) / 2;
    float sum[2];
    __syncthreads();
    for (int i = threadIdx.x, k = 0; i < half; i += blockDim.x, ++k)
      sum[k] = v[2 * i] + (2 * i + 1 < n ? v[2 * i + 1] : 0.0f);
    __syncthreads();
    for (int i = threadIdx.x, k = 0; i < half; i += blockDim.x, ++k) v[i] = sum[k];
    n = half;
  }
  __syncthreads();
  return v[0];
}

// Largest magnitude of v[0..n), NaN if there is one.
__device__ inline float largest_in_block(const float* v, int n) {
  __syncthreads();
  float largest = 0.0f;
  for (int i = 0; i < n; ++i) largest = max_nan(largest, fabsf(v[i]));
  return largest;
}

}  // namespace megatron_compress
