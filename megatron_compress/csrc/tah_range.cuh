// From the extremes of a tile to its scale, zero and codes (ops/tah_quant.py).
#pragma once

#include "tah_quant.cuh"

namespace megatron_compress::tah {

constexpr float kMinSpan = 0x1p-126f;
constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, which the low bits hold
constexpr uint32_t kRounderBits = 0x4b400000u;

__device__ __forceinline__ float bfloat16_saturated(float x) {
  return from_bfloat16_bits(bfloat16_bits(saturate(x, kBFloat16Max)));
}

// A tile's scale, zero and quantizer, from the extremes of its (transformed) values: code = levels * q, where
// q = (y - reference) * inverse within [0, 1].
struct Range {
  float scale, zero, reference, inverse, levels;
};

__device__ __forceinline__ Range range_of(float low, float high, bool rotated, int bits) {
  low += 0.0f;  // -0 is 0: which of them is met depends on the order
  high += 0.0f;
  Range r;
  r.levels = float((1 << bits) - 1);
  r.zero = bfloat16_saturated(low * (1.0f / kHeadroom));
  r.reference = rotated ? low : r.zero * kHeadroom;
  r.scale = bfloat16_saturated(__fdiv_rn(fmaxf(high - r.reference, 0.0f), r.levels) * (1.0f / kHeadroom));
  const float span = (r.scale * kHeadroom) * r.levels;
  r.inverse = span < kMinSpan ? 0.0f : __frcp_rn(span);
  return r;
}

// From y - reference; the code stands in the low bits, behind those of kRounder.
__device__ __forceinline__ uint32_t rounded(float distance, const Range& r) {
  return __float_as_uint(__saturatef(distance * r.inverse) * r.levels + kRounder);
}

// Joins four codes of `bits` bits, each of its own weight, and takes off what kRounder added.
struct Quad {
  uint32_t weight[4], offset;

  __device__ __forceinline__ explicit Quad(int bits) : weight{1u, 1u << bits, 1u << 2 * bits, 1u << 3 * bits} {
    offset = kRounderBits * (weight[0] + weight[1] + weight[2] + weight[3]);
  }
  // Of four values less the reference.
  __device__ __forceinline__ uint32_t of(const float* distance, const Range& r) const {
    return rounded(distance[3], r) * weight[3] +
           (rounded(distance[2], r) * weight[2] + (rounded(distance[1], r) * weight[1] + (rounded(distance[0], r) - offset)));
  }
};

// The extremes of a row's values, and of its magnitudes the largest and the second; NaN where one is not finite.
struct Extremes {
  float low, high, largest, second;
};

template <int N>
__device__ __forceinline__ Extremes extremes_of(const float (&v)[N]) {
  Extremes e{v[0], v[0], 0.0f, 0.0f};
#pragma unroll
  for (int i = 0; i < N; ++i) {
    e.low = fminf(e.low, v[i]);
    e.high = fmaxf(e.high, v[i]);
    e.second = fmaxf(e.second, fminf(e.largest, fabsf(v[i])));
    e.largest = max_nan(e.largest, fabsf(v[i]));
  }
  return e;
}

// The same of 16-bit floats as they are, two at a time, times kHeadroom.
template <class Pair, DType kDType, int N>
__device__ __forceinline__ Extremes extremes_of_pairs(const uint32_t (&words)[N]) {
  const auto pair = [](uint32_t bits) { return *reinterpret_cast<const Pair*>(&bits); };
  Pair low = pair(words[0]), high = low, largest = pair(0u), second = largest;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const Pair magnitude = pair(words[i] & 0x7fff7fffu);
    low = __hmin2(low, pair(words[i]));
    high = __hmax2(high, pair(words[i]));
    second = __hmax2(second, __hmin2(largest, magnitude));
    largest = __hmax2_nan(largest, magnitude);
  }
  const auto floats = [](Pair two) { return unpack_pair(*reinterpret_cast<const uint32_t*>(&two), kDType); };
  const float2 lows = floats(low), highs = floats(high), firsts = floats(largest), seconds = floats(second);
  return {fminf(lows.x, lows.y) * kHeadroom, fmaxf(highs.x, highs.y) * kHeadroom,
          max_nan(firsts.x, firsts.y) * kHeadroom,
          fmaxf(fminf(firsts.x, firsts.y), fmaxf(seconds.x, seconds.y)) * kHeadroom};
}

template <int kLanes>
__device__ __forceinline__ Extremes across_lanes(Extremes e) {
#pragma unroll
  for (int distance = 1; distance < kLanes; distance *= 2) {
    const float other = __shfl_xor_sync(kAllLanes, e.largest, distance);
    e.second = fmaxf(fmaxf(e.second, __shfl_xor_sync(kAllLanes, e.second, distance)), fminf(e.largest, other));
    e.largest = max_nan(e.largest, other);
    e.low = fminf(e.low, __shfl_xor_sync(kAllLanes, e.low, distance));
    e.high = fmaxf(e.high, __shfl_xor_sync(kAllLanes, e.high, distance));
  }
  return e;
}

}  // namespace megatron_compress::tah
