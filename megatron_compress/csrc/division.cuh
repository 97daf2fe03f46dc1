// Division of indices by what is known at launch: a multiplication and a shift.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace megatron_compress {

// By 1 to 2^31, of numbers below 2^31.
struct Division {
  uint32_t magic = 0, shift = 0;

  explicit Division(uint32_t divisor) {
    while ((uint64_t(1) << shift) < divisor) ++shift;
    magic = uint32_t(((uint64_t(1) << (31 + shift)) + divisor - 1) / divisor);
  }

  __device__ __forceinline__ uint32_t of(uint32_t n) const { return __umulhi(2 * n, magic) >> shift; }
};

}  // namespace megatron_compress
