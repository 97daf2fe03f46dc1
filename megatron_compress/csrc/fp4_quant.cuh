// Device side of compressors/fp4_quant.py: one thread holds min(G, 64) neighbouring values of a group of G, so that
// most of the transform needs no exchange between threads. Values are in half precision, two a word: word 4 b + j holds
// elements 8 b + j and 8 b + j + 4, which lie 16 bits apart in packed codes too.
#pragma once

#include "warp_rows.cuh"

namespace megatron_compress::fp4 {

// As in ops/fp4_quant.py.
constexpr float kMinPeak = 0x1p-110f;
constexpr float kMinFactor = 0x1p-120f;
constexpr float kMinLargest = 0x1p-14f;

enum class Scales { kSingle, kDual, kClipped };

__device__ __forceinline__ __half2 as_half2(uint32_t bits) { return *reinterpret_cast<const __half2*>(&bits); }
__device__ __forceinline__ uint32_t as_bits(__half2 pair) { return *reinterpret_cast<const uint32_t*>(&pair); }

// Codes are the exponent and mantissa bits of a half in units of kUnit, in which the format's smallest normal is half's:
// rounding to them is rounding at bit kPosition, subnormals included.
template <bool kE3M0>
struct Format {
  static constexpr int kPosition = kE3M0 ? 10 : 9;                         // of the code's lowest bit in a half
  static constexpr uint32_t kHalfStep = kE3M0 ? 0x01ff01ffu : 0x00ff00ffu;  // just below half a code, in both halves
  static constexpr float kUnit = kE3M0 ? 0x1p-12f : 0x1p-14f;
  static constexpr float kMax = kE3M0 ? 16.0f : 6.0f;

  // Four words of values to eight codes, element i in nibble i.
  static __device__ __forceinline__ uint32_t quantize_8(const __half2* t) {
    uint32_t packed = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t w = as_bits(t[j]);
      const uint32_t odd = (w >> kPosition) & 0x00010001u;
      const uint32_t rounded = (w + kHalfStep + odd) << (12 - kPosition);
      const uint32_t nibble = (rounded & 0x7fff7fffu) | (w & 0x80008000u);
      packed = ((packed >> 4) & 0x0fff0fffu) | (nibble & 0xf000f000u);
    }
    return packed;
  }

  // Back to four words of values.
  static __device__ __forceinline__ void unpack_8(uint32_t packed, __half2* w) {
    constexpr uint32_t kMagnitude = 0x00070007u << kPosition;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int left = kPosition - 4 * j;
      const uint32_t magnitude = left >= 0 ? packed << (left & 31) : packed >> (-left & 31);
      w[j] = as_half2((magnitude & kMagnitude) | ((packed << (12 - 4 * j)) & 0x80008000u));
    }
  }
};

// A group's power of two: the largest that is not above `magnitude` (a positive normal, an infinity or NaN), and over 1.
struct Power {
  uint32_t exponent;

  explicit __device__ __forceinline__ Power(float magnitude) { exponent = __float_as_uint(magnitude) >> 23 & 0xff; }
  __device__ __forceinline__ bool finite() const { return exponent < 255; }
  __device__ __forceinline__ float value() const { return __uint_as_float(exponent << 23); }
  __device__ __forceinline__ float twice_inverse() const { return __uint_as_float((255 - exponent) << 23); }
};

// Stages at distances 1, 2, ... below min(N, kEnd) of the transform of a thread's N values.
template <int N, int kEnd = N>
__device__ __forceinline__ void transform(__half2 (&w)[N / 2]) {
#pragma unroll
  for (int distance = 1; distance < N && distance < kEnd; distance *= 2) {
    const int words = distance < 4 ? distance : distance / 2;
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      if (distance == 4) {  // within the word
        w[i] = __hfma2(__high2half2(w[i]), as_half2(0xbc003c00u), __low2half2(w[i]));
      } else if (!(i & words)) {
        const __half2 a = w[i], b = w[i + words];
        w[i] = __hadd2(a, b);
        w[i + words] = __hsub2(a, b);
      }
    }
  }
}

// The stages that follow, between the kLanes neighbouring threads that share a group.
template <int kLanes, int N>
__device__ __forceinline__ void transform_across_lanes(__half2 (&w)[N], int lane) {
#pragma unroll
  for (int distance = 1; distance < kLanes; distance *= 2) {
    const __half2 sign = as_half2(lane & distance ? 0xbc00bc00u : 0x3c003c00u);
#pragma unroll
    for (int i = 0; i < N; ++i) w[i] = __hfma2(w[i], sign, __shfl_xor_sync(kAllLanes, w[i], distance));
  }
}

struct GroupScale {
  float inverse;  // multiplies the rotated values before they are quantized
  float scale, alpha;
};

// largest: of the magnitudes of rotated values, which are times growth and unit.
template <bool kE3M0>
__device__ __forceinline__ GroupScale single_scale(float largest, float growth, Power unit) {
  using F = Format<kE3M0>;
  const float scale = ((largest * growth) * (1.0f / F::kMax)) * unit.value();
  return {__frcp_rn(largest) * (F::kMax * F::kUnit), unit.finite() ? scale : quiet_nan(), 0.0f};
}

// The paper's two scales. squares: sum of squares of the group's n values.
template <bool kE3M0, Scales kScales>
__device__ __forceinline__ GroupScale dual_scale(GroupScale single, float largest, float squares, float growth,
                                                 Power unit, int block, int n, float norm) {
  using F = Format<kE3M0>;
  constexpr bool kClipped = kScales == Scales::kClipped;
  const float taken = kClipped ? unit.value() : 1.0f;
  const float mean_square = ((squares * float(double(growth) * growth * block / n)) * taken) * taken;
  const float alpha = saturate_between(__frcp_rn(__fsqrt_rn(mean_square + 1e-6f)) * F::kMax, 1e-3f, 1e3f);
  float scale = (((alpha * (largest * growth)) * (norm * block)) * taken) * (1.0f / F::kMax);
  if (kClipped) {
    scale = saturate_between(scale, 1e-12f, 1e6f);
    const float inverse = (((__frcp_rn(scale) * alpha) * (norm * block)) * taken) * (growth * F::kUnit);
    single.inverse = min_nan(inverse, kFloat16Max);
  }
  single.scale = unit.finite() ? scale : quiet_nan();
  single.alpha = unit.finite() ? (kClipped ? alpha : (alpha * 0.5f) * unit.twice_inverse()) : quiet_nan();
  return single;
}

// Sum of squares of a thread's N values by the tree of adjacent pairs.
template <int N>
__device__ __forceinline__ float sum_of_squares(const __half2 (&w)[N / 2]) {
  float of_eight[N / 8];
#pragma unroll
  for (int b = 0; b < N / 8; ++b) {
    float2 square[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 v = __half22float2(w[4 * b + j]);
      square[j] = {v.x * v.x, v.y * v.y};
    }
    const float low = (square[0].x + square[1].x) + (square[2].x + square[3].x);
    of_eight[b] = low + ((square[0].y + square[1].y) + (square[2].y + square[3].y));
  }
  return pairwise_sum<N / 8>(of_eight);
}

// w: rotated values of kLanes neighbouring threads, which quantize them into N / 8 words of codes each.
template <bool kE3M0, int kLanes, Scales kScales, int N>
__device__ __forceinline__ GroupScale quantize_group(__half2 (&w)[N / 2], uint32_t (&codes)[N / 8], float growth,
                                                     Power unit, float norm) {
  using F = Format<kE3M0>;
  __half2 most = __habs2(w[0]);
#pragma unroll
  for (int i = 1; i < N / 2; ++i) most = __hmax2(most, __habs2(w[i]));
#pragma unroll
  for (int distance = 1; distance < kLanes; distance *= 2)
    most = __hmax2(most, __shfl_xor_sync(kAllLanes, most, distance));
  const float largest = fmaxf(__half2float(__hmax(__low2half(most), __high2half(most))), kMinLargest);
  GroupScale s = single_scale<kE3M0>(largest, growth, unit);
  if constexpr (kScales != Scales::kSingle) {
    const float squares = sum_across_lanes<kLanes>(sum_of_squares<N>(w));
    s = dual_scale<kE3M0, kScales>(s, largest, squares, growth, unit, N * kLanes, N * kLanes, norm);
  }
  const __half2 inverse = __float2half2_rn(s.inverse), limit = __float2half2_rn(F::kMax * F::kUnit);
  const uint32_t keep = unit.finite() ? ~0u : 0u;  // no branch, so that the words are computed side by side
#pragma unroll
  for (int b = 0; b < N / 8; ++b) {
    __half2 t[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      t[j] = __hmul2(w[4 * b + j], inverse);
      if (kScales == Scales::kClipped) t[j] = __hmin2(__hmax2(t[j], __hneg2(limit)), limit);
    }
    codes[b] = F::quantize_8(t) & keep;
  }
  return s;
}

template <int N>
__device__ __forceinline__ void load_codes(const uint8_t* source, uint32_t (&packed)[N / 8], bool valid) {
#pragma unroll
  for (int i = 0; i < N / 32; ++i) {
    const uint4 four = valid ? reinterpret_cast<const uint4*>(source)[i] : uint4{};
    packed[4 * i] = four.x, packed[4 * i + 1] = four.y, packed[4 * i + 2] = four.z, packed[4 * i + 3] = four.w;
  }
}

}  // namespace megatron_compress::fp4
