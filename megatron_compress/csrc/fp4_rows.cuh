// What the kernels of fp4_quant share: blocks of 128 rows and a last one for the shorter group, if any.
#pragma once

#include <type_traits>

#include "block.cuh"
#include "fp4_quant.cuh"

namespace megatron_compress::fp4 {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;

template <int G>
struct Geometry {
  static constexpr int kRow = G < 64 ? G : 64;  // values a thread holds
  static constexpr int kLanes = G / kRow;       // threads that share a group
};

struct Target {
  uint8_t* codes;
  float *scales, *alphas;
};

// 1 / sqrt(block) of a power of two, as float32 rounds it.
__device__ __forceinline__ float norm_of(int block) {
  const int exponent = 31 - __clz(block);
  return __uint_as_float(uint32_t(127 - exponent / 2) << 23) * (exponent % 2 ? 0.70710678f : 1.0f);
}

__device__ __forceinline__ float group_factor(const Fp4Payloads& p, int rank, int64_t group, bool dual, float norm) {
  const float scale = reinterpret_cast<const float*>(p.scales.data + rank * p.scales.stride)[group];
  if (!dual) return scale;
  return __fdiv_rn(scale * norm, reinterpret_cast<const float*>(p.alphas.data + rank * p.alphas.stride)[group]);
}

// How payloads are added: values of codes, in the format's unit, times weights; the sum is times growth and unit.
template <bool kE3M0>
struct Weights {
  float growth;
  Power unit;

  __device__ __forceinline__ Weights(const Fp4Payloads& p, int64_t group, bool dual, float norm, bool valid)
      : unit(largest(p, group, dual, norm, valid)) {
    growth = float(2 << (p.ranks > 1 ? 32 - __clz(p.ranks - 1) : 0));
  }

  __device__ __forceinline__ __half of(float factor) const {
    return __float2half_rn((factor * unit.twice_inverse()) * (0.5f / (growth * Format<kE3M0>::kUnit)));
  }

  static __device__ __forceinline__ float largest(const Fp4Payloads& p, int64_t group, bool dual, float norm,
                                                  bool valid) {
    float largest = kMinFactor;
    for (int rank = 0; valid && rank < p.ranks; ++rank)
      largest = max_nan(largest, group_factor(p, rank, group, dual, norm));
    return largest;
  }
};

// A lane's row of codes as values in the format's unit, added to `total` times `weight`, or in its place.
template <bool kE3M0, int N>
__device__ __forceinline__ void add_row(const Fp4Payloads& p, int rank, int64_t row, bool valid, __half weight,
                                        __half2 (&total)[N / 2]) {
  uint32_t packed[N / 8];
  load_codes<N>(p.codes.data + rank * p.codes.stride + row * (N / 2), packed, valid);
  const __half2 both = __half2half2(weight);
#pragma unroll
  for (int b = 0; b < N / 8; ++b) {
    __half2 w[4];
    Format<kE3M0>::unpack_8(packed[b], w);
#pragma unroll
    for (int j = 0; j < 4; ++j) total[4 * b + j] = rank ? __hfma2(w[j], both, total[4 * b + j]) : __hmul2(w[j], both);
  }
}

// The weighted sum of a lane's rows.
template <int G, bool kE3M0, int N>
__device__ __forceinline__ void add_rows(const Fp4Payloads& p, int64_t row, bool valid, bool dual, float norm,
                                         const Weights<kE3M0>& weights, __half2 (&total)[N / 2]) {
  const int64_t group = row / Geometry<G>::kLanes;
  add_row<kE3M0, N>(p, 0, row, valid, weights.of(valid ? group_factor(p, 0, group, dual, norm) : 0.0f), total);
#pragma unroll 1
  for (int rank = 1; rank < p.ranks; ++rank)
    add_row<kE3M0, N>(p, rank, row, valid, weights.of(valid ? group_factor(p, rank, group, dual, norm) : 0.0f), total);
}

// The value of a tail's code in the format's unit.
template <bool kE3M0>
__device__ __forceinline__ float code_at(const Fp4Payloads& p, int rank, int64_t i) {
  const int code = p.codes.data[rank * p.codes.stride + i / 2] >> (i % 2 * 4) & 15;
  const uint16_t bits = uint16_t((code & 7) << Format<kE3M0>::kPosition | (code & 8) << 12);
  return __half2float(__ushort_as_half(bits));
}

// The weighted sum of a tail, into total[0..n).
template <bool kE3M0>
__device__ void add_tails(const Fp4Payloads& p, float* total, int n, int64_t group, int64_t first, bool dual,
                          const Weights<kE3M0>& weights) {
  for (int rank = 0; rank < p.ranks; ++rank) {
    const __half weight = weights.of(group_factor(p, rank, group, dual, norm_of(n & -n)));
    for (int i = threadIdx.x; i < n; i += kThreads) {
      const __half value = __float2half_rn(code_at<kE3M0>(p, rank, first + i));
      total[i] = __half2float(rank ? __hfma(value, weight, __float2half_rn(total[i])) : __hmul(value, weight));
    }
  }
}

template <int G, int N>
__device__ __forceinline__ void store_group(const GroupScale& s, const uint32_t (&words)[N / 8], uint8_t* shared,
                                            const Target& to, int64_t first_row, int rows, int lane, bool dual) {
  using Codes = WarpRows<N / 2>;
  __syncwarp();
#pragma unroll
  for (int i = 0; i < N / 32; ++i)
    reinterpret_cast<uint4*>(shared + lane * Codes::kStride)[i] =
        make_uint4(words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]);
  Codes::store_dense(shared, to.codes + first_row * (N / 2), rows, lane, true);
  constexpr int kLanes = Geometry<G>::kLanes;
  if (lane % kLanes == 0 && lane < rows) {
    to.scales[(first_row + lane) / kLanes] = s.scale;
    if (dual) to.alphas[(first_row + lane) / kLanes] = s.alpha;
  }
}

// The last, shorter group, by a whole block. v: its n rotated values, which are times growth and unit.
template <bool kE3M0, Scales kScales>
__device__ void encode_tail(float* v, float* scratch, int n, int64_t group, int64_t first, const Target& to,
                            float growth, Power unit) {
  using F = Format<kE3M0>;
  const int block = n & -n;
  const float norm = norm_of(block);
  const float largest = fmaxf(largest_in_block(v, n), kMinLargest);
  GroupScale s = single_scale<kE3M0>(largest, growth, unit);
  if (kScales != Scales::kSingle) {
    for (int i = threadIdx.x; i < n; i += kThreads) scratch[i] = v[i] * v[i];
    s = dual_scale<kE3M0, kScales>(s, largest, pairwise_sum_in_block(scratch, n), growth, unit, block, n, norm);
  }
  __syncthreads();
  const float inverse = round_half(s.inverse), limit = F::kMax * F::kUnit;
  for (int i = threadIdx.x * 8; i < n; i += kThreads * 8) {
    float t[8];
    for (int k = 0; k < 8; ++k) {
      t[k] = i + k < n ? v[i + k] * inverse : 0.0f;
      if (kScales == Scales::kClipped) t[k] = saturate(t[k], limit);
    }
    __half2 pairs[4];
    for (int j = 0; j < 4; ++j) pairs[j] = __floats2half2_rn(t[j], t[j + 4]);
    const uint32_t packed = unit.finite() ? F::quantize_8(pairs) : 0u;
    for (int byte = 0; byte < 4 && i + 2 * byte < n; ++byte)
      to.codes[(first + i) / 2 + byte] = uint8_t(packed >> (8 * byte));
  }
  if (threadIdx.x == 0) {
    to.scales[group] = s.scale;
    if (kScales != Scales::kSingle) to.alphas[group] = s.alpha;
  }
}

struct Launch {
  int64_t num_rows;
  unsigned blocks;
};

template <int G>
Launch launch_of(int64_t numel) {
  const int64_t rows = numel / G * Geometry<G>::kLanes;
  return {rows, unsigned((rows + kThreads - 1) / kThreads + (numel % G > 0))};
}

// Call f with the group size as a constant.
template <class F>
void with_group(int group_size, F f) {
  switch (group_size) {
    case 32: return f(std::integral_constant<int, 32>());
    case 64: return f(std::integral_constant<int, 64>());
    case 128: return f(std::integral_constant<int, 128>());
    case 256: return f(std::integral_constant<int, 256>());
    case 512: return f(std::integral_constant<int, 512>());
  }
}

template <class F>
void with_scales(const Fp4Settings& s, F f) {
  if (!s.dual) return f(std::integral_constant<Scales, Scales::kSingle>());
  if (!s.paper_clips) return f(std::integral_constant<Scales, Scales::kDual>());
  return f(std::integral_constant<Scales, Scales::kClipped>());
}

template <class F>
void with_bool(bool value, F f) {
  value ? f(std::true_type()) : f(std::false_type());
}

}  // namespace megatron_compress::fp4
