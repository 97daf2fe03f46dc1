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

  // Whole rows that follow each other in memory, 16 bytes a lane at a time: every address is one of the lane's, plus a
  // constant.
  static __device__ __forceinline__ void start_dense(uint8_t* shared, const uint8_t* source, int rows, int lane,
                                                      bool aligned) {
    if (!aligned || rows < 32) return start(shared, [&](int row) { return source + row * kBytes; }, rows, lane, aligned);
    uint8_t* target = shared + lane / kChunks * kStride + lane % kChunks * 16;
    source += lane * 16;
#pragma unroll
    for (int step = 0; step < kChunks; ++step) copy_async_16(target + step * (32 / kChunks * kStride), source + step * 512);
  }

  static __device__ __forceinline__ void store_dense(const uint8_t* shared, uint8_t* target, int rows, int lane,
                                                     bool aligned) {
    if (!aligned || rows < 32) return store(shared, [&](int row) { return target + row * kBytes; }, rows, lane, aligned);
    __syncwarp();
    const uint8_t* source = shared + lane / kChunks * kStride + lane % kChunks * 16;
    target += lane * 16;
#pragma unroll
    for (int step = 0; step < kChunks; ++step)
      *reinterpret_cast<uint4*>(target + step * 512) =
          *reinterpret_cast<const uint4*>(source + step * (32 / kChunks * kStride));
    __syncwarp();
  }

  static __device__ __forceinline__ void load_dense(uint8_t* shared, const uint8_t* source, int rows, int lane,
                                                     bool aligned) {
    start_dense(shared, source, rows, lane, aligned);
    finish();
  }

  static __device__ __forceinline__ void finish() {
    wait_for_copies();
    __syncwarp();
  }

  // Rows anywhere: the first `rows` of them; address(row) must be callable by all lanes at once. `aligned`: to 16.
  template <class Address>
  static __device__ __forceinline__ void start(uint8_t* shared, Address address, int rows, int lane, bool aligned) {
    if (aligned) {
#pragma unroll
      for (int step = 0; step < kChunks; ++step) {
        const int row = (step * 32 + lane) / kChunks, offset = (step * 32 + lane) % kChunks * 16;
        const uint8_t* source = address(row) + offset;
        if (row < rows) copy_async_16(shared + row * kStride + offset, source);
      }
    } else {
      for (int row = 0; row < rows; ++row) {
        const uint8_t* source = address(row);
        for (int i = lane; i < kBytes / 2; i += 32)
          reinterpret_cast<uint16_t*>(shared + row * kStride)[i] = reinterpret_cast<const uint16_t*>(source)[i];
      }
    }
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

__device__ __forceinline__ void unpack_16(uint4 bits, DType dtype, float* v) {
  const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = unpack_pair(words[i], dtype);
    v[2 * i] = pair.x;
    v[2 * i + 1] = pair.y;
  }
}

// kItem is the size of dtype, 2 or 4 bytes; `row` is aligned to 16 bytes. The dtype is told once, not for each pair.
template <int kItem, int N>
__device__ __forceinline__ void read_row(const uint8_t* row, DType dtype, float (&v)[N]) {
  const auto* chunks = reinterpret_cast<const uint4*>(row);
  if constexpr (kItem == 4) {
#pragma unroll
    for (int i = 0; i < N / 4; ++i) {
      const uint4 bits = chunks[i];
      v[4 * i] = __uint_as_float(bits.x), v[4 * i + 1] = __uint_as_float(bits.y);
      v[4 * i + 2] = __uint_as_float(bits.z), v[4 * i + 3] = __uint_as_float(bits.w);
    }
  } else if (dtype == DType::kBFloat16) {
#pragma unroll
    for (int i = 0; i < N / 8; ++i) unpack_16(chunks[i], DType::kBFloat16, v + 8 * i);
  } else {
#pragma unroll
    for (int i = 0; i < N / 8; ++i) unpack_16(chunks[i], DType::kFloat16, v + 8 * i);
  }
}

__device__ __forceinline__ uint4 pack_16(const float* v, DType dtype) {
  return make_uint4(pack_pair(v[0], v[1], dtype), pack_pair(v[2], v[3], dtype), pack_pair(v[4], v[5], dtype),
                    pack_pair(v[6], v[7], dtype));
}

template <int kItem, int N>
__device__ __forceinline__ void write_row(uint8_t* row, DType dtype, const float (&v)[N]) {
  auto* chunks = reinterpret_cast<uint4*>(row);
  if constexpr (kItem == 4) {
#pragma unroll
    for (int i = 0; i < N / 4; ++i)
      chunks[i] = make_uint4(__float_as_uint(v[4 * i]), __float_as_uint(v[4 * i + 1]), __float_as_uint(v[4 * i + 2]),
                             __float_as_uint(v[4 * i + 3]));
  } else if (dtype == DType::kBFloat16) {
#pragma unroll
    for (int i = 0; i < N / 8; ++i) chunks[i] = pack_16(v + 8 * i, DType::kBFloat16);
  } else {
#pragma unroll
    for (int i = 0; i < N / 8; ++i) chunks[i] = pack_16(v + 8 * i, DType::kFloat16);
  }
}

// Eight neighbouring elements as they lie in memory, so that loads can be started before their values are wanted.
template <int kItem>
struct Eight {
  uint4 bits[kItem / 2];

  static __device__ __forceinline__ Eight load(const uint8_t* source, bool aligned) {
    Eight eight;
    if (aligned) {
#pragma unroll
      for (int i = 0; i < kItem / 2; ++i) eight.bits[i] = reinterpret_cast<const uint4*>(source)[i];
    } else {
      for (int i = 0; i < 4 * kItem; ++i)
        reinterpret_cast<uint16_t*>(eight.bits)[i] = reinterpret_cast<const uint16_t*>(source)[i];
    }
    return eight;
  }

  __device__ __forceinline__ void values(DType dtype, float (&v)[8]) const {
    read_row<kItem>(reinterpret_cast<const uint8_t*>(bits), dtype, v);
  }
};

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
