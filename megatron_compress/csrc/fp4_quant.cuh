// Device side of compressors/fp4_quant.py: one thread holds min(G, 64) neighbouring values of a group of G, so that
// most of the transform needs no exchange between threads.
#pragma once

#include "warp_rows.cuh"

namespace megatron_compress::fp4 {

constexpr float kMinScale = 0x1p-120f;

// Codes are the exponent and mantissa bits of a half-precision number scaled so that the format's smallest normal is
// half's smallest normal: rounding to them is rounding at bit `position`, subnormals included.
struct Format {
  int position;        // of the code's lowest bit in a half
  uint32_t half_step;  // just below half a code, in both halves of a word
  uint32_t shrink;     // the scaling, as half2
  float max, inverse_max;
};

enum class Scales { kSingle, kDual, kClipped };

__device__ __forceinline__ Format format_of(bool e3m0) {
  return e3m0 ? Format{10, 0x01ff01ffu, 0x0c000c00u, 16.0f, 1.0f / 16.0f}
              : Format{9, 0x00ff00ffu, 0x04000400u, 6.0f, 1.0f / 6.0f};
}

__device__ __forceinline__ __half2 as_half2(uint32_t bits) { return *reinterpret_cast<const __half2*>(&bits); }
__device__ __forceinline__ uint32_t as_bits(__half2 pair) { return *reinterpret_cast<const uint32_t*>(&pair); }

// Eight codes, element i in nibble i: the halves of word j hold elements j and j + 4.
__device__ __forceinline__ uint32_t quantize_8(const float* t, const Format& f) {
  uint32_t packed = 0;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const uint32_t w = as_bits(__hmul2(__floats2half2_rn(t[j], t[j + 4]), as_half2(f.shrink)));
    const uint32_t odd = (w >> f.position) & 0x00010001u;
    const uint32_t rounded = (w + f.half_step + odd) << (12 - f.position);
    const uint32_t nibble = (rounded & 0x7fff7fffu) | (w & 0x80008000u);
    packed = ((packed >> 4) & 0x0fff0fffu) | (nibble & 0xf000f000u);
  }
  return packed;
}

struct GroupScale {
  float inverse;  // multiplies the transformed values before they are quantized
  float scale, alpha;
  bool finite;
};

// largest: of the transformed magnitudes, which hold kHeadroom; block: length of the transform.
__device__ __forceinline__ GroupScale single_scale(float largest, int block, const Format& f) {
  const bool finite = is_finite(largest);
  largest = max_nan(largest, kMinScale);
  const float scale = (largest * f.inverse_max) * (1.0f / (kHeadroom * block));
  return {__frcp_rn(largest) * f.max, finite ? scale : quiet_nan(), 0.0f, finite};
}

// The paper's two scales. squares: sum of (transformed value * single.inverse)^2 over the group's n values.
template <Scales kScales>
__device__ __forceinline__ GroupScale dual_scale(GroupScale single, float largest, float squares, int block, int n,
                                                 float norm, const Format& f) {
  constexpr bool kClipped = kScales == Scales::kClipped;
  largest = max_nan(largest, kMinScale);
  // x is taken times 2^-exponent * block * kHeadroom, so that alpha is of the order of one; under the clips as it is.
  const float power = kClipped ? 1.0f : __uint_as_float((254u - (__float_as_uint(largest) >> 23)) << 23);
  const float gain = kClipped ? 1.0f : block * kHeadroom;
  const float unit = kClipped ? largest * (1.0f / kHeadroom) : largest * power;
  const float ratio = float((kClipped ? 1.0 / block : double(block)) / n);
  const float root = unit * f.inverse_max;
  const float mean_square = (squares * ratio) * (root * root);
  const float alpha = saturate_between(__frcp_rn(__fsqrt_rn(mean_square + 1e-6f)) * f.max, 1e-3f, 1e3f);
  float scale = ((alpha * unit) * (kClipped ? norm : norm * block)) * f.inverse_max;
  if (kClipped) {
    scale = saturate_between(scale, 1e-12f, 1e6f);
    single.inverse = (__frcp_rn(scale) * (alpha * norm)) * (1.0f / kHeadroom);
  }
  single.scale = single.finite ? scale : quiet_nan();
  single.alpha = single.finite ? (alpha * gain) * power : quiet_nan();
  return single;
}

// v: transformed values of kLanes neighbouring threads, which quantize them into N / 8 words each.
template <int kLanes, Scales kScales, int N>
__device__ __forceinline__ GroupScale quantize_group(float (&v)[N], uint32_t (&words)[N / 8], float norm,
                                                     const Format& f) {
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < N; ++i) largest = max_nan(largest, fabsf(v[i]));
  largest = max_across_lanes<kLanes>(largest);
  GroupScale s = single_scale(largest, N * kLanes, f);
  if constexpr (kScales != Scales::kSingle) {
    float square[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float t = v[i] * s.inverse;
      square[i] = t * t;
      if (kScales == Scales::kDual) v[i] = t;
    }
    const float squares = sum_across_lanes<kLanes>(pairwise_sum<N>(square));
    s = dual_scale<kScales>(s, largest, squares, N * kLanes, N * kLanes, norm, f);
  }
  if constexpr (kScales != Scales::kDual) {
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] *= s.inverse;
  }
  if constexpr (kScales == Scales::kClipped) {
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] = saturate(v[i], f.max);
  }
  const uint32_t keep = s.finite ? ~0u : 0u;  // no branch, so that the words are computed side by side
#pragma unroll
  for (int i = 0; i < N / 8; ++i) words[i] = quantize_8(v + 8 * i, f) & keep;
  return s;
}

// Halves hold codes as bits, that is values times 2^-14 (E2M1) or 2^-12 (E3M0).
template <bool kE3M0>
constexpr float kCodeUnit = kE3M0 ? 0x1p-12f : 0x1p-14f;

// The codes of eight elements; the halves of word j are elements j and j + 4.
template <bool kE3M0>
__device__ __forceinline__ void unpack_8(uint32_t packed, __half2* w) {
  constexpr int kPosition = kE3M0 ? 10 : 9;
  constexpr uint32_t kMagnitude = 0x00070007u << kPosition;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int left = kPosition - 4 * j;
    const uint32_t magnitude = left >= 0 ? packed << (left & 31) : packed >> (-left & 31);
    w[j] = as_half2((magnitude & kMagnitude) | ((packed << (12 - 4 * j)) & 0x80008000u));
  }
}

template <int N>
__device__ __forceinline__ void load_codes(const uint8_t* source, uint32_t (&packed)[N / 8], bool valid) {
#pragma unroll
  for (int i = 0; i < N / 32; ++i) {
    const uint4 four = valid ? reinterpret_cast<const uint4*>(source)[i] : uint4{};
    packed[4 * i] = four.x, packed[4 * i + 1] = four.y, packed[4 * i + 2] = four.z, packed[4 * i + 3] = four.w;
  }
}

// A row of codes transformed, in units of kCodeUnit. Sums of codes are exact in half precision up to 2048 of their
// smallest steps, so that most stages treat two values at once.
template <bool kE3M0, int kLanes, int N>
__device__ __forceinline__ void transform_codes(const uint32_t (&packed)[N / 8], float (&v)[N], int lane) {
  constexpr int kExact = kE3M0 ? 32 : 64;  // longest transform that half precision holds
  __half2 w[N / 2];
#pragma unroll
  for (int block = 0; block < N / 8; ++block) {
    unpack_8<kE3M0>(packed[block], w + 4 * block);
#pragma unroll
    for (int distance = 1; distance < 4; distance *= 2) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (j & distance) continue;
        const __half2 a = w[4 * block + j], b = w[4 * block + j + distance];
        w[4 * block + j] = __hadd2(a, b);
        w[4 * block + j + distance] = __hsub2(a, b);
      }
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {  // distance 4 lies within the word
      const __half2 a = w[4 * block + j];
      w[4 * block + j] = __hfma2(a, as_half2(0xbc003c00u), __lowhigh2highlow(a));
    }
  }
#pragma unroll
  for (int distance = 4; distance < N / 2 && distance < kExact / 2; distance *= 2) {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      if (i & distance) continue;
      const __half2 a = w[i], b = w[i + distance];
      w[i] = __hadd2(a, b);
      w[i + distance] = __hsub2(a, b);
    }
  }
#pragma unroll
  for (int i = 0; i < N / 2; ++i) {
    const float2 pair = __half22float2(w[i]);
    v[i / 4 * 8 + i % 4] = pair.x;
    v[i / 4 * 8 + i % 4 + 4] = pair.y;
  }
  if constexpr (N > kExact) hadamard_in_thread<N, kExact>(v);
  hadamard_across_lanes<N, kLanes>(v, lane);
}

// total += codes * factor, or = where `first`.
template <bool kE3M0, int N>
__device__ __forceinline__ void add_codes(const uint32_t (&packed)[N / 8], float factor, bool first, float (&total)[N]) {
  factor *= 1.0f / kCodeUnit<kE3M0>;
#pragma unroll
  for (int block = 0; block < N / 8; ++block) {
    __half2 w[4];
    unpack_8<kE3M0>(packed[block], w);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 pair = __half22float2(w[j]);
      float &low = total[8 * block + j], &high = total[8 * block + j + 4];
      low = first ? pair.x * factor : low + pair.x * factor;
      high = first ? pair.y * factor : high + pair.y * factor;
    }
  }
}

}  // namespace megatron_compress::fp4
