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

__device__ __forceinline__ float code_at(const Fp4Payloads& p, int rank, int64_t i, bool e3m0) {
  const int code = p.codes.data[rank * p.codes.stride + i / 2] >> (i % 2 * 4) & 15;
  const uint32_t bits = uint32_t(code & 7) << (e3m0 ? 10 : 9);
  const float magnitude = __half2float(__ushort_as_half(uint16_t(bits))) * (e3m0 ? 0x1p12f : 0x1p14f);
  return code & 8 ? -magnitude : magnitude;
}

// Sum over ranks of a tail's codes times their factors and `unit`, into total[0..n).
__device__ inline void add_tails(const Fp4Payloads& p, float* total, int n, int64_t group, int64_t first, bool e3m0,
                                 bool dual, float unit) {
  for (int rank = 0; rank < p.ranks; ++rank) {
    const float factor = group_factor(p, rank, group, dual, norm_of(n & -n)) * unit;
    for (int i = threadIdx.x; i < n; i += kThreads) {
      const float part = code_at(p, rank, first + i, e3m0) * factor;
      total[i] = rank ? total[i] + part : part;
    }
  }
}

// A lane's row of a payload's codes, and its factor.
template <int G, int N>
__device__ __forceinline__ float load_row(const Fp4Payloads& p, int rank, int64_t row, bool valid, bool dual, float norm,
                                          uint32_t (&packed)[N / 8]) {
  load_codes<N>(p.codes.data + rank * p.codes.stride + row * (N / 2), packed, valid);
  return valid ? group_factor(p, rank, row / Geometry<G>::kLanes, dual, norm) : 0.0f;
}

// Sum over ranks of a lane's codes times their factors and `unit`.
template <int G, bool kE3M0, int N>
__device__ __forceinline__ void add_rows(const Fp4Payloads& p, float (&total)[N], int64_t row, bool valid, bool dual,
                                         float norm, float unit) {
#pragma unroll 1
  for (int rank = 0; rank < p.ranks; ++rank) {
    uint32_t packed[N / 8];
    const float factor = load_row<G, N>(p, rank, row, valid, dual, norm, packed);
    fp4::add_codes<kE3M0>(packed, factor * unit, rank == 0, total);
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

// The last, shorter group, by a whole block. v: its n values, transformed, times kHeadroom.
template <Scales kScales>
__device__ void encode_tail(float* v, float* scratch, int n, int64_t group, int64_t first, const Target& to,
                            const Format& f) {
  const int block = n & -n;
  const float norm = norm_of(block);
  const float largest = largest_in_block(v, n);
  GroupScale s = fp4::single_scale(largest, block, f);
  if (kScales != Scales::kSingle) {
    for (int i = threadIdx.x; i < n; i += kThreads) scratch[i] = (v[i] * s.inverse) * (v[i] * s.inverse);
    s = fp4::dual_scale<kScales>(s, largest, pairwise_sum_in_block(scratch, n), block, n, norm, f);
  }
  __syncthreads();
  for (int i = threadIdx.x * 8; i < n; i += kThreads * 8) {
    float t[8];
    for (int k = 0; k < 8; ++k)
      t[k] = i + k < n ? (kScales == Scales::kClipped ? saturate(v[i + k] * s.inverse, f.max) : v[i + k] * s.inverse)
                       : 0.0f;
    const uint32_t packed = s.finite ? fp4::quantize_8(t, f) : 0u;
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
