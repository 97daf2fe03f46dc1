// The launchers, free of torch so that kernel files compile quickly. Pointers are device memory, sizes count elements
// unless they say bytes; nothing is allocated and the host is never waited for.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace megatron_compress {

enum class DType : int { kFloat32, kBFloat16, kFloat16 };

__host__ __device__ constexpr int item_bytes(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

// Rows of one section in stacked payloads: row i begins at data + i * stride bytes.
struct Rows {
  const uint8_t* data;
  int64_t stride;
};

struct Fp4Settings {
  int group_size;    // 32, 64, 128, 256, 512
  bool e3m0;         // else e2m1
  bool dual;         // two scales a group
  bool paper_clips;  // dual only
};

// Sections of `ranks` stacked payloads.
struct Fp4Payloads {
  Rows codes, scales, alphas;
  int ranks;
};

void fp4_quant_encode(const void* x, DType dtype, int64_t numel, uint8_t* codes, float* scales, float* alphas,
                      Fp4Settings settings, cudaStream_t stream);
void fp4_quant_decode(Fp4Payloads payloads, void* out, DType dtype, int64_t numel, Fp4Settings settings,
                      cudaStream_t stream);
void fp4_quant_requantize(Fp4Payloads payloads, int64_t numel, uint8_t* codes, float* scales, float* alphas,
                          Fp4Settings settings, cudaStream_t stream);

// Grouped codes under one scale: fp8 (bits = 0, float32 scales) and fixed_point (bits 2 to 16, bfloat16 scales).
struct ScaledPayloads {
  Rows codes, scales;
  int ranks;
};

void scaled_encode(const void* x, DType dtype, int64_t numel, uint8_t* codes, void* scales, int group_size, int bits,
                   cudaStream_t stream);
void scaled_decode(ScaledPayloads payloads, void* out, DType dtype, int64_t numel, int group_size, int bits,
                   cudaStream_t stream);
// Whole groups of 8 to 256 elements (a power of two) only.
bool can_requantize(int group_size, int64_t numel);
void scaled_requantize(ScaledPayloads payloads, DType dtype, int64_t numel, uint8_t* codes, void* scales,
                       int group_size, int bits, cudaStream_t stream);

// fixed_point with a scale per channel; `partial` holds channel_partials(rows) * channels float32.
int channel_partials(int64_t rows);
void channel_encode(const void* x, DType dtype, int64_t rows, int64_t channels, uint8_t* codes, void* scales, int bits,
                    float* partial, cudaStream_t stream);
// Any number of rows and channels, slowly.
void channel_decode_any(ScaledPayloads payloads, void* out, DType dtype, int64_t numel, int64_t channels, int bits,
                        cudaStream_t stream);
void channel_decode(ScaledPayloads payloads, void* out, DType dtype, int64_t rows, int64_t channels, int bits,
                    cudaStream_t stream);

// Unnormalized transform of groups of a power of two, 8 to 512, times `scale`; numel is a multiple of group_size.
void hadamard(const void* x, void* out, DType dtype, int64_t numel, int group_size, float scale, cudaStream_t stream);

// How tah_quant cuts a message, as ops.tiling.Tiling; `inner` counts the rows that lie behind the sample dimension.
// Fewer than 2^31 tiles.
struct TahTiling {
  uint32_t samples, rows, inner, channels;
  uint32_t group, per_window, windows, rest_tiles, short_length, high_per_sample;
  int high_bits, low_bits;
  float threshold;

  __host__ __device__ uint32_t whole_tiles() const { return windows * per_window + rest_tiles; }
  __host__ __device__ uint32_t tiles() const { return whole_tiles() + (short_length > 0); }
  __host__ __device__ uint32_t all_rows() const { return samples * rows; }
  __host__ __device__ uint32_t all_whole_tiles() const { return all_rows() * whole_tiles(); }
  __host__ __device__ uint32_t sample_windows() const { return rows * windows; }
  // 32-bit words of flags that a sample's windows take; each thread of the scan reads four at a time.
  __host__ __device__ uint32_t words() const { return (sample_windows() + 127) / 128 * 4; }
  __host__ __device__ int pivot_bits() const {
    int bits = 0;
    while ((1u << bits) < group) ++bits;
    return bits;
  }
};

struct TahPayload {
  uint8_t *high_codes, *low_codes, *short_codes, *scales, *zeros, *high_map, *pivots;
};

int64_t tah_quant_encode_workspace(const TahTiling& tiling);
void tah_quant_encode(const void* x, DType dtype, const TahTiling& tiling, TahPayload payload, uint8_t* workspace,
                      cudaStream_t stream);
// Payload r begins r * stride bytes behind the first.
int64_t tah_quant_decode_workspace(const TahTiling& tiling, int ranks);
void tah_quant_decode(TahPayload payload, int64_t stride, int ranks, void* out, DType dtype, const TahTiling& tiling,
                      uint8_t* workspace, cudaStream_t stream);

}  // namespace megatron_compress
