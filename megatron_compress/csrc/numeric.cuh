// Exact numerics that every kernel shares. The files are compiled with --fmad=false: a multiply and an add are two
// roundings, as in the PyTorch reference, unless a fused step is written out because its product is exact.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "kernels.h"

namespace megatron_compress {

constexpr unsigned kAllLanes = 0xffffffffu;
constexpr float kHeadroom = 0x1p-10f;  // as HEADROOM in ops/
constexpr float kFloatMax = 3.402823466e+38f;
constexpr float kBFloat16Max = 3.3895313892515355e+38f;
constexpr float kFloat16Max = 65504.0f;

// fmaxf and fminf drop NaN; torch's amax and clamp keep it.
__device__ __forceinline__ float max_nan(float a, float b) {
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}

__device__ __forceinline__ float min_nan(float a, float b) {
  float r;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
  return r;
}

__device__ __forceinline__ float saturate_between(float x, float low, float high) {
  return min_nan(max_nan(x, low), high);
}

__device__ __forceinline__ float saturate(float x, float limit) { return saturate_between(x, -limit, limit); }

__device__ __forceinline__ bool is_finite(float x) { return fabsf(x) <= kFloatMax; }

__device__ __forceinline__ float largest_finite(DType dtype) {
  return dtype == DType::kFloat32 ? kFloatMax : dtype == DType::kBFloat16 ? kBFloat16Max : kFloat16Max;
}

// The quiet NaN that torch writes; the hardware's own is 0x7fffffff.
__device__ __forceinline__ float quiet_nan() { return __uint_as_float(0x7fc00000u); }

__device__ __forceinline__ uint16_t bfloat16_bits(float x) { return __bfloat16_as_ushort(__float2bfloat16_rn(x)); }

__device__ __forceinline__ float from_bfloat16_bits(uint16_t bits) { return __uint_as_float(uint32_t(bits) << 16); }

// Stages of the Walsh-Hadamard transform at distances first, 2 first, ... below N, on the values of one thread.
template <int N, int kFirst = 1>
__device__ __forceinline__ void hadamard_in_thread(float (&v)[N]) {
#pragma unroll
  for (int distance = kFirst; distance < N; distance *= 2) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (i & distance) continue;
      const float a = v[i], b = v[i + distance];
      v[i] = a + b;
      v[i + distance] = a - b;
    }
  }
}

// The stages that follow, between the kLanes neighbouring threads that share a group of kLanes * N values.
template <int N, int kLanes>
__device__ __forceinline__ void hadamard_across_lanes(float (&v)[N], int lane, unsigned mask = kAllLanes) {
#pragma unroll
  for (int distance = 1; distance < kLanes; distance *= 2) {
    const float sign = lane & distance ? -1.0f : 1.0f;
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] = __fmaf_rn(v[i], sign, __shfl_xor_sync(mask, v[i], distance));
  }
}

// Sum of N values by the binary tree of adjacent pairs (ops.reduce.pairwise_sum).
template <int N>
__device__ __forceinline__ float pairwise_sum(const float* v) {
  if constexpr (N == 1) {
    return v[0];
  } else {
    return pairwise_sum<N / 2>(v) + pairwise_sum<N / 2>(v + N / 2);
  }
}

template <int kLanes>
__device__ __forceinline__ float sum_across_lanes(float x) {
#pragma unroll
  for (int distance = 1; distance < kLanes; distance *= 2) x += __shfl_xor_sync(kAllLanes, x, distance);
  return x;
}

template <int kLanes>
__device__ __forceinline__ float max_across_lanes(float x) {
#pragma unroll
  for (int distance = 1; distance < kLanes; distance *= 2) x = max_nan(x, __shfl_xor_sync(kAllLanes, x, distance));
  return x;
}

template <int kLanes>
__device__ __forceinline__ float min_across_lanes(float x) {
#pragma unroll
  for (int distance = 1; distance < kLanes; distance *= 2) x = min_nan(x, __shfl_xor_sync(kAllLanes, x, distance));
  return x;
}

}  // namespace megatron_compress
