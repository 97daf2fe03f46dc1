// What fp8 and fixed_point share: eight neighbouring elements a thread, a chunk; codes of B bits under a scale.
#pragma once

#include <type_traits>

#include "warp_rows.cuh"

namespace megatron_compress {

// The codes of a chunk: a bit stream of the low min(B, 8) bits of each, and one of the others (ops/bits.py).
struct Codes {
  uint64_t low, high;
};

// E4M3 codes under a float32 scale (compressors/fp8.py).
struct Fp8Code {
  using Scale = float;
  static constexpr int kBits = 8;
  static constexpr float kLargest = 448.0f;

  // largest: magnitude of what shares the scale; NaN where it is not finite.
  static __device__ __forceinline__ Scale scale_of(float largest) {
    const float magnitude = max_nan(largest, 0x1p-110f);
    return is_finite(magnitude) ? magnitude * float(1.0 / 448) : quiet_nan();
  }

  // What elements are multiplied by before `encode`.
  static __device__ __forceinline__ float step(Scale scale) { return __frcp_rn(scale); }
  static __device__ __forceinline__ float factor(Scale scale) { return scale; }

  static __device__ __forceinline__ Codes encode(const float (&q)[8]) {
    uint32_t words[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t low = __nv_cvt_float2_to_fp8x2({q[4 * i], q[4 * i + 1]}, __NV_SATFINITE, __NV_E4M3);
      const uint32_t high = __nv_cvt_float2_to_fp8x2({q[4 * i + 2], q[4 * i + 3]}, __NV_SATFINITE, __NV_E4M3);
      words[i] = low | high << 16;
    }
    return {words[0] | uint64_t(words[1]) << 32, 0};
  }

  static __device__ __forceinline__ void decode(Codes codes, float (&v)[8]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const auto pair = __nv_fp8x2_storage_t(codes.low >> (16 * i));
      const float2 two = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(pair, __NV_E4M3)));
      v[2 * i] = two.x;
      v[2 * i + 1] = two.y;
    }
  }
};

// Integers in [-kLargest, kLargest], stored plus kLargest, under a bfloat16 scale (compressors/fixed_point.py).
template <int B>
struct FixedPointCode {
  using Scale = uint16_t;
  static constexpr int kBits = B;
  static constexpr float kLargest = (1 << (B - 1)) - 1;
  // Adding 1.5 * 2^23 rounds to the nearest even integer, which stands in the low bits behind kRounder's own.
  static constexpr float kRounder = 12582912.0f;
  static constexpr uint32_t kRounderBits = 0x4b400000u;

  static __device__ __forceinline__ Scale scale_of(float largest) {
    const float clamped = fminf(fmaxf(largest, 0x1p-110f), kBFloat16Max);
    return is_finite(largest) ? uint16_t((__float_as_uint(clamped) + 0xffffu) >> 16) : uint16_t(0x7fc0);
  }

  static __device__ __forceinline__ float step(Scale scale) {
    return __frcp_rn(from_bfloat16_bits(scale)) * kLargest;
  }

  static __device__ __forceinline__ float factor(Scale scale) {
    return from_bfloat16_bits(scale) * float(1.0 / ((1 << (B - 1)) - 1));
  }

  // |q| is at most kLargest but for rounding, for the scale was rounded up, unless it is bfloat16's largest (`clamp`).
  static __device__ __forceinline__ Codes encode(const float (&q)[8]) {
    constexpr uint32_t kOffset = kRounderBits - uint32_t(kLargest);
    if constexpr (B <= 8) {
      uint32_t half[2] = {};
#pragma unroll
      for (int i = 0; i < 8; ++i)  // the offsets cancel modulo 2^32
        half[i / 4] += (__float_as_uint(q[i] + kRounder) << (B * (i % 4))) - (kOffset << (B * (i % 4)));
      return {half[0] | uint64_t(half[1]) << (4 * B), 0};
    } else {
      Codes codes = {};
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const uint32_t code = __float_as_uint(q[i] + kRounder) - kOffset;
        codes.low |= uint64_t(code & 0xff) << (8 * i);
        codes.high |= uint64_t(code >> 8) << ((B - 8) * i);
      }
      return codes;
    }
  }

  static __device__ __forceinline__ void decode(Codes codes, float (&v)[8]) {
    constexpr int kLow = B < 8 ? B : 8;
    const uint32_t halves[2] = {uint32_t(codes.low), uint32_t(codes.low >> (4 * kLow))};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      uint32_t code = halves[i / 4] >> (kLow * (i % 4)) & ((1u << kLow) - 1);
      if constexpr (B > 8) code |= (uint32_t(codes.high >> ((B - 8) * i)) & ((1u << (B - 8)) - 1)) << 8;
      v[i] = __uint_as_float(0x4b000000u | code) - (8388608.0f + kLargest);
    }
  }
};

// Before `encode`: elements times their steps, of which none is NaN where `finite`; zeros where one is. largest: no smaller
// than any magnitude.
template <class Code>
__device__ __forceinline__ void quantize_chunk(float (&v)[8], const float (&step)[8], bool finite, float largest) {
#pragma unroll
  for (int i = 0; i < 8; ++i) v[i] *= step[i];
  if (!finite) {
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = step[i] == step[i] ? v[i] : 0.0f;
  }
  if (largest <= kBFloat16Max) return;
#pragma unroll
  for (int i = 0; i < 8; ++i) v[i] = saturate(v[i], Code::kLargest);
}

// Call f with the code of fixed_point's `bits`, or with fp8's for 0.
template <class F>
void with_code(int bits, F f) {
  switch (bits) {
    case 0: return f(Fp8Code());
    case 2: return f(FixedPointCode<2>());
    case 3: return f(FixedPointCode<3>());
    case 4: return f(FixedPointCode<4>());
    case 5: return f(FixedPointCode<5>());
    case 6: return f(FixedPointCode<6>());
    case 7: return f(FixedPointCode<7>());
    case 8: return f(FixedPointCode<8>());
    case 9: return f(FixedPointCode<9>());
    case 10: return f(FixedPointCode<10>());
    case 11: return f(FixedPointCode<11>());
    case 12: return f(FixedPointCode<12>());
    case 13: return f(FixedPointCode<13>());
    case 14: return f(FixedPointCode<14>());
    case 15: return f(FixedPointCode<15>());
    case 16: return f(FixedPointCode<16>());
  }
}

// `count` bytes, at most kMost (4 or 8), at a multiple of kAlign (1, 2 or 4), of memory whose words of four bytes exist as
// soon as one of their bytes does: payloads begin and end at multiples of 16 bytes. What lies behind them may be anything.
template <int kMost, int kAlign>
__device__ __forceinline__ uint64_t load_bytes(const uint8_t* source, int count) {
  const uint32_t offset = kAlign < 4 ? reinterpret_cast<uintptr_t>(source) & (4 - kAlign) : 0;
  const auto* words = reinterpret_cast<const uint32_t*>(source - offset);
  const uint32_t first = words[0], second = offset + count > 4 ? words[1] : 0;
  const uint32_t low = __funnelshift_r(first, second, 8 * offset);
  if constexpr (kMost == 4) return low;
  const uint32_t third = 4 - kAlign + kMost > 8 && offset + count > 8 ? words[2] : 0;
  return low | uint64_t(__funnelshift_r(second, third, 8 * offset)) << 32;
}

template <int kBytes>
__device__ __forceinline__ void store_stream(uint8_t* target, uint64_t stream, int count) {
  const auto address = reinterpret_cast<uintptr_t>(target);
  if (kBytes == 8 && count == 8 && address % 8 == 0) {
    *reinterpret_cast<uint64_t*>(target) = stream;
  } else if (kBytes == 4 && count == 4 && address % 4 == 0) {
    *reinterpret_cast<uint32_t*>(target) = uint32_t(stream);
  } else if (kBytes % 2 == 0 && count == kBytes && address % 2 == 0) {
#pragma unroll
    for (int i = 0; i < kBytes / 2; ++i) reinterpret_cast<uint16_t*>(target)[i] = uint16_t(stream >> (16 * i));
  } else {
#pragma unroll
    for (int i = 0; i < kBytes; ++i)
      if (i < count) target[i] = uint8_t(stream >> (8 * i));
  }
}

__device__ __forceinline__ int stream_bytes(int count, int bits) { return (count * bits + 7) / 8; }

// The codes of elements [8 chunk, 8 chunk + count) of a payload of numel elements, which begins at a multiple of 16 bytes.
template <int B>
__device__ __forceinline__ Codes load_codes(const uint8_t* codes, int64_t numel, int64_t chunk, int count) {
  constexpr int kLow = B < 8 ? B : 8, kAlign = kLow % 4 == 0 ? 4 : kLow % 2 == 0 ? 2 : 1;
  const uint8_t* low = codes + chunk * kLow;
  Codes result = {};
  if (kLow == 8 && count == 8) {
    result.low = *reinterpret_cast<const uint64_t*>(low);
  } else {
    result.low = load_bytes<kLow <= 4 ? 4 : kLow, kAlign>(low, stream_bytes(count, kLow));
  }
  if constexpr (B > 8)
    result.high = load_bytes<B <= 12 ? 4 : 8, 1>(codes + numel + chunk * (B - 8), stream_bytes(count, B - 8));
  return result;
}

template <int B>
__device__ __forceinline__ void store_codes(uint8_t* codes, int64_t numel, int64_t chunk, int count, Codes value) {
  constexpr int kLow = B < 8 ? B : 8;
  store_stream<kLow>(codes + chunk * kLow, value.low, stream_bytes(count, kLow));
  if constexpr (B > 8)
    store_stream<B - 8>(codes + numel + chunk * (B - 8), value.high, stream_bytes(count, B - 8));
}

// With zeros behind the first `count` codes of a chunk.
template <int B>
__device__ __forceinline__ Codes first_codes(Codes codes, int count) {
  constexpr int kLow = B < 8 ? B : 8;
  codes.low &= ~uint64_t(0) >> (64 - count * kLow);
  if (B > 8) codes.high &= ~uint64_t(0) >> (64 - count * (B - 8));
  return codes;
}

// The payloads of fp8 and fixed_point have the same two sections.
template <class Code>
__device__ __forceinline__ typename Code::Scale scale_at(const ScaledPayloads& p, int rank, int64_t index) {
  return reinterpret_cast<const typename Code::Scale*>(p.scales.data + rank * p.scales.stride)[index];
}

// Eight elements from `first` on; `aligned`: that is a multiple of 16 bytes.
__device__ __forceinline__ void store_eight(void* out, DType dtype, int64_t first, bool aligned, const float (&v)[8]) {
  auto* target = static_cast<uint8_t*>(out) + first * item_bytes(dtype);
  if (!aligned) {
#pragma unroll
    for (int i = 0; i < 8; ++i) write_item(out, dtype, first + i, v[i]);
  } else if (dtype == DType::kFloat32) {
    write_row<4>(target, dtype, v);
  } else {
    write_row<2>(target, dtype, v);
  }
}

// Eight elements from 8 chunk on, zeros behind `count`.
__device__ __forceinline__ void load_chunk(const void* x, DType dtype, int64_t chunk, int count, bool aligned,
                                           float (&v)[8]) {
  if (aligned && count == 8) {
    if (dtype == DType::kFloat32) {
      read_row<4>(static_cast<const uint8_t*>(x) + chunk * 32, dtype, v);
    } else {
      read_row<2>(static_cast<const uint8_t*>(x) + chunk * 16, dtype, v);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = i < count ? read_item(x, dtype, chunk * 8 + i) : 0.0f;
  }
}

__device__ __forceinline__ void store_chunk(void* out, DType dtype, int64_t chunk, int count, bool aligned,
                                            const float (&v)[8]) {
  if (count == 8) return store_eight(out, dtype, chunk * 8, aligned, v);
#pragma unroll
  for (int i = 0; i < 8; ++i)
    if (i < count) write_item(out, dtype, chunk * 8 + i, v[i]);
}

// Whether codes times their factors stay within the limit.
template <class Code>
__device__ __forceinline__ bool fits(const float (&factor)[8], float limit) {
  bool inside = true;
#pragma unroll
  for (int i = 0; i < 8; ++i) inside &= Code::kLargest * factor[i] <= limit;
  return inside;
}

// Quantize a chunk, whole or not, of a tensor at any address; step_of(i) is the step of element i.
template <class Code, class StepOf>
__device__ __forceinline__ void quantize_slowly(const void* x, DType dtype, int64_t numel, int64_t chunk, StepOf step_of,
                                                uint8_t* codes) {
  const int count = int(min(int64_t(8), numel - chunk * 8));
  if (count <= 0) return;
  float v[8], step[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int64_t index = chunk * 8 + (i < count ? i : 0);
    v[i] = read_item(x, dtype, index);
    step[i] = step_of(index);
  }
  quantize_chunk<Code>(v, step, false, kFloatMax);
  store_codes<Code::kBits>(codes, numel, chunk, count, first_codes<Code::kBits>(Code::encode(v), count));
}

// A chunk times its factors, saturated where it does not fit.
__device__ __forceinline__ void scale_chunk(float (&v)[8], const float (&factor)[8], bool fits, float limit) {
#pragma unroll
  for (int i = 0; i < 8; ++i) v[i] *= factor[i];
  if (fits) return;
#pragma unroll
  for (int i = 0; i < 8; ++i) v[i] = saturate(v[i], limit);
}

inline unsigned blocks_of(int64_t items, int64_t per_block) { return unsigned((items + per_block - 1) / per_block); }

}  // namespace megatron_compress
