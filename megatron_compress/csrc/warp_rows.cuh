// A warp's share of a tensor: 32 rows of kBytes contiguous bytes, one row a lane, staged through shared memory. Rows
// are padded by 16 bytes, so that both the global side (16 bytes a lane, coalesced) and a lane's walk along its own
// row are free of bank conflicts.
#pragma once

#include "numeric.cuh"

namespace megatron_compress {

__device__ __forceinline__ void copy_async_16(void* shared, const void* global) {
  const unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(global));
}

__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

template <int kBytes>
struct WarpRows {
  static constexpr int kStride = kBytes + 16;
  static constexpr int kSharedBytes = 32 * kStride;
  static constexpr int kChunks = kBytes / 16;  // a power of two

  // Fill the first `rows` rows; address(row) must be callable by all lanes at once. `aligned`: to 16 bytes.
  template <class Address>
  static __device__ __forceinline__ void load(uint8_t* shared, Address address, int rows, int lane, bool aligned) {
    if (aligned) {
#pragma unroll
      for (int step = 0; step < kChunks; ++step) {
        const int row = (step * 32 + lane) / kChunks, offset = (step * 32 + lane) % kChunks * 16;
        const uint8_t* source = address(row) + offset;
        if (row < rows) copy_async_16(shared + row * kStride + offset, source);
      }
      wait_for_copies();
    } else {
      for (int row = 0; row < rows; ++row) {
        const uint8_t* source = address(row);
        for (int i = lane; i < kBytes / 2; i += 32)
          reinterpret_cast<uint16_t*>(shared + row * kStride)[i] = reinterpret_cast<const uint16_t*>(source)[i];
      }
    }
    __syncwarp();
  }

  template <class Address>
  static __device__ __forceinline__ void store(const uint8_t* shared, Address address, int rows, int lane,
                                               bool aligned) {
    __syncwarp();
    if (aligned) {
#pragma unroll
      for (int step = 0; step < kChunks; ++step) {
        const int row = (step * 32 + lane) / kChunks, offset = (step * 32 + lane) % kChunks * 16;
        uint8_t* target = address(row) + offset;
        if (row < rows)
          *reinterpret_cast<uint4*>(target) = *reinterpret_cast<const uint4*>(shared + row * kStride + offset);
      }
    } else {
      for (int row = 0; row < rows; ++row) {
        uint8_t* target = address(row);
        for (int i = lane; i < kBytes / 2; i += 32)
          reinterpret_cast<uint16_t*>(target)[i] = reinterpret_cast<const uint16_t*>(shared + row * kStride)[i];
      }
    }
    __syncwarp();
  }
};

// Bits of 16-bit floats as float32; exact.
__device__ __forceinline__ float2 unpack_pair(uint32_t pair, DType dtype) {
  if (dtype == DType::kBFloat16) return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
  return __half22float2(*reinterpret_cast<const __half2*>(&pair));
}

__device__ __forceinline__ uint32_t pack_pair(float low, float high, DType dtype) {
  if (dtype == DType::kBFloat16) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// kItem is the size of dtype, 2 or 4 bytes; `row` is aligned to 16 bytes.
template <int kItem, int N>
__device__ __forceinline__ void read_row(const uint8_t* row, DType dtype, float (&v)[N]) {
#pragma unroll
  for (int chunk = 0; chunk < N * kItem / 16; ++chunk) {
    const uint4 bits = reinterpret_cast<const uint4*>(row)[chunk];
    const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (kItem == 4) {
        v[chunk * 4 + i] = __uint_as_float(words[i]);
      } else {
        const float2 pair = unpack_pair(words[i], dtype);
        v[chunk * 8 + 2 * i] = pair.x;
        v[chunk * 8 + 2 * i + 1] = pair.y;
      }
    }
  }
}

template <int kItem, int N>
__device__ __forceinline__ void write_row(uint8_t* row, DType dtype, const float (&v)[N]) {
#pragma unroll
  for (int chunk = 0; chunk < N * kItem / 16; ++chunk) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (kItem == 4) {
        words[i] = __float_as_uint(v[chunk * 4 + i]);
      } else {
        words[i] = pack_pair(v[chunk * 8 + 2 * i], v[chunk * 8 + 2 * i + 1], dtype);
      }
    }
    reinterpret_cast<uint4*>(row)[chunk] = make_uint4(words[0], words[1], words[2], words[3]);
  }
}

// One element at a time, for tails and odd shapes.
__device__ __forceinline__ float read_item(const void* x, DType dtype, int64_t i) {
  if (dtype == DType::kFloat32) return static_cast<const float*>(x)[i];
  if (dtype == DType::kBFloat16) return __bfloat162float(static_cast<const __nv_bfloat16*>(x)[i]);
  return __half2float(static_cast<const __half*>(x)[i]);
}

__device__ __forceinline__ void write_item(void* x, DType dtype, int64_t i, float value) {
  if (dtype == DType::kFloat32) {
    static_cast<float*>(x)[i] = value;
  } else if (dtype == DType::kBFloat16) {
    static_cast<__nv_bfloat16*>(x)[i] = __float2bfloat16_rn(value);
  } else {
    static_cast<__half*>(x)[i] = __float2half_rn(value);
  }
}

__device__ __forceinline__ float round_to(float value, DType dtype) {
  if (dtype == DType::kFloat32) return value;
  return dtype == DType::kBFloat16 ? __bfloat162float(__float2bfloat16_rn(value)) : __half2float(__float2half_rn(value));
}

// x times kHeadroom, then the transform's first stage. The product is exact for 16-bit floats, so it may be fused.
template <bool kExact, int N>
__device__ __forceinline__ void headroom_and_first_stage(float (&v)[N]) {
#pragma unroll
  for (int i = 0; i < N; i += 2) {
    const float a = v[i] * kHeadroom;
    if constexpr (kExact) {
      const float b = v[i + 1];
      v[i] = __fmaf_rn(b, kHeadroom, a);
      v[i + 1] = __fmaf_rn(b, -kHeadroom, a);
    } else {
      const float b = v[i + 1] * kHeadroom;
      v[i] = a + b;
      v[i + 1] = a - b;
    }
  }
}

inline bool is_aligned_16(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

}  // namespace megatron_compress
