// What fp8 and fixed_point share: eight neighbouring elements a thread, codes of a number of bits, one scale.
#pragma once

#include "warp_rows.cuh"

namespace megatron_compress {

// E4M3 codes under a float32 scale (compressors/fp8.py).
struct Fp8Code {
  using Scale = float;
  static constexpr float kMax = 448.0f;
  static constexpr float kMinMagnitude = 0x1p-110f;

  explicit __host__ __device__ Fp8Code(int) {}
  __device__ int bits() const { return 8; }

  // largest: magnitude of the group; NaN where it is not finite.
  __device__ __forceinline__ Scale scale_of(float largest) const {
    const float magnitude = max_nan(largest, kMinMagnitude);
    return is_finite(magnitude) ? magnitude * (1.0f / kMax) : quiet_nan();
  }

  // What elements are multiplied by before `encode`.
  __device__ __forceinline__ float step(Scale scale) const { return __frcp_rn(scale); }

  __device__ __forceinline__ uint32_t encode(float scaled) const {
    const float x = isnan(scaled) ? 0.0f : scaled;
    return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3);
  }

  __device__ __forceinline__ float factor(Scale scale) const { return scale; }

  __device__ __forceinline__ float decode(uint32_t code) const {
    return __half2float(__half(__nv_cvt_fp8_to_halfraw(__nv_fp8_storage_t(code), __NV_E4M3)));
  }
};

// Integers in [-levels, levels], stored plus levels, under a bfloat16 scale (compressors/fixed_point.py).
struct FixedPointCode {
  using Scale = uint16_t;
  int bits_;
  float levels, inverse_levels;

  explicit __host__ __device__ FixedPointCode(int bits)
      : bits_(bits), levels(float((1 << (bits - 1)) - 1)), inverse_levels(float(1.0 / ((1 << (bits - 1)) - 1))) {}
  __device__ int bits() const { return bits_; }

  __device__ __forceinline__ Scale scale_of(float largest) const {
    const float clamped = fminf(fmaxf(largest, 0x1p-110f), kBFloat16Max);
    return is_finite(largest) ? uint16_t((__float_as_uint(clamped) + 0xffffu) >> 16) : uint16_t(0x7fc0);
  }

  __device__ __forceinline__ float step(Scale scale) const { return __frcp_rn(from_bfloat16_bits(scale)) * levels; }

  __device__ __forceinline__ uint32_t encode(float scaled) const {
    // Adding 1.5 * 2^23 rounds to the nearest even integer, which then stands in the low bits.
    const float q = isnan(scaled) ? 0.0f : fminf(fmaxf(scaled, -levels), levels);
    return (__float_as_uint(q + 12582912.0f) + uint32_t(levels)) & 0xffffu;
  }

  __device__ __forceinline__ float factor(Scale scale) const { return from_bfloat16_bits(scale) * inverse_levels; }
  __device__ __forceinline__ float decode(uint32_t code) const { return float(code) - levels; }
};

// Codes of up to 8 bits are one bit stream; of more, the bytes of their low 8 bits, then the stream of the rest
// (ops/bits.py). A chunk is eight codes: `bits` bytes, or 8 and `bits` - 8.
__device__ __forceinline__ uint64_t pack_chunk(const uint32_t (&codes)[8], int bits) {
  uint64_t stream = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) stream |= uint64_t(codes[i]) << (bits * i);
  return stream;
}

__device__ __forceinline__ void unpack_chunk(uint64_t stream, int bits, uint32_t (&codes)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) codes[i] = uint32_t(stream >> (bits * i)) & ((1u << bits) - 1);
}

// `bytes` (1 to 8) bytes at any address; `count` of them exist.
__device__ __forceinline__ uint64_t load_stream(const uint8_t* source, int bytes, int count) {
  if (bytes == 8 && count == 8 && reinterpret_cast<uintptr_t>(source) % 8 == 0)
    return *reinterpret_cast<const uint64_t*>(source);
  if (bytes == 4 && count == 4 && reinterpret_cast<uintptr_t>(source) % 4 == 0)
    return *reinterpret_cast<const uint32_t*>(source);
  uint64_t stream = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i)
    if (i < count) stream |= uint64_t(source[i]) << (8 * i);
  return stream;
}

__device__ __forceinline__ void store_stream(uint8_t* target, uint64_t stream, int count) {
  if (count == 8 && reinterpret_cast<uintptr_t>(target) % 8 == 0) {
    *reinterpret_cast<uint64_t*>(target) = stream;
    return;
  }
  if (count == 4 && reinterpret_cast<uintptr_t>(target) % 4 == 0) {
    *reinterpret_cast<uint32_t*>(target) = uint32_t(stream);
    return;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i)
    if (i < count) target[i] = uint8_t(stream >> (8 * i));
}

// The payloads of fp8 and fixed_point have the same two sections.
template <class Code>
__device__ __forceinline__ typename Code::Scale scale_at(const ScaledPayloads& p, int rank, int64_t index) {
  return reinterpret_cast<const typename Code::Scale*>(p.scales.data + rank * p.scales.stride)[index];
}

__device__ __forceinline__ int stream_bytes(int count, int bits) { return (count * bits + 7) / 8; }

// The codes of elements [8 chunk, 8 chunk + count) of a payload of numel elements.
__device__ __forceinline__ void load_codes(const uint8_t* codes, int64_t numel, int64_t chunk, int count, int bits,
                                           uint32_t (&out)[8]) {
  if (bits <= 8) {
    unpack_chunk(load_stream(codes + chunk * bits, bits, stream_bytes(count, bits)), bits, out);
    return;
  }
  uint32_t high[8];
  unpack_chunk(load_stream(codes + chunk * 8, 8, count), 8, out);
  unpack_chunk(load_stream(codes + numel + chunk * (bits - 8), bits - 8, stream_bytes(count, bits - 8)), bits - 8, high);
#pragma unroll
  for (int i = 0; i < 8; ++i) out[i] |= high[i] << 8;
}

__device__ __forceinline__ void store_codes(uint8_t* codes, int64_t numel, int64_t chunk, int count, int bits,
                                            const uint32_t (&in)[8]) {
  if (bits <= 8) {
    store_stream(codes + chunk * bits, pack_chunk(in, bits), stream_bytes(count, bits));
    return;
  }
  uint32_t low[8], high[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    low[i] = in[i] & 0xff;
    high[i] = in[i] >> 8;
  }
  store_stream(codes + chunk * 8, pack_chunk(low, 8), count);
  store_stream(codes + numel + chunk * (bits - 8), pack_chunk(high, bits - 8), stream_bytes(count, bits - 8));
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
  if (aligned && count == 8) {
    if (dtype == DType::kFloat32) {
      write_row<4>(static_cast<uint8_t*>(out) + chunk * 32, dtype, v);
    } else {
      write_row<2>(static_cast<uint8_t*>(out) + chunk * 16, dtype, v);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (i < count) write_item(out, dtype, chunk * 8 + i, v[i]);
  }
}

}  // namespace megatron_compress
