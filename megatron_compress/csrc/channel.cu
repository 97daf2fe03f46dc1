// Kernels of fixed_point with a scale per channel: a tensor of rows by channels is read twice, backwards the second
// time, so that what the cache still holds of the first pass is not fetched again.
#include "scaled_codes.cuh"

namespace megatron_compress {
namespace {

constexpr int kThreads = 256;
constexpr int kMaxSlabs = 64;
constexpr int kRowsAThread = 8;

int64_t rows_of_slab(int64_t rows) { return (rows + channel_partials(rows) - 1) / channel_partials(rows); }

// Largest magnitudes of the rows of a slab (blockIdx.y), for kColumns neighbouring channels a thread.
template <int kColumns>
__global__ void __launch_bounds__(kThreads) slab_largest(const void* x, DType dtype, int64_t rows, int64_t channels,
                                                         int64_t slab_rows, float* partial) {
  const int64_t column = (int64_t(blockIdx.x) * 32 + threadIdx.x % 32) * kColumns;
  const int64_t begin = blockIdx.y * slab_rows, end = min(rows, begin + slab_rows);
  float largest[kColumns] = {};
  if (column < channels) {
#pragma unroll 4
    for (int64_t row = begin + threadIdx.x / 32; row < end; row += kThreads / 32) {
      if constexpr (kColumns == 8) {
        float v[8];
        load_chunk(x, dtype, (row * channels + column) / 8, 8, true, v);
#pragma unroll
        for (int i = 0; i < 8; ++i) largest[i] = max_nan(largest[i], fabsf(v[i]));
      } else {
        largest[0] = max_nan(largest[0], fabsf(read_item(x, dtype, row * channels + column)));
      }
    }
  }
  __shared__ float shared[kThreads / 32][32 * kColumns];
#pragma unroll
  for (int i = 0; i < kColumns; ++i) shared[threadIdx.x / 32][i * 32 + threadIdx.x % 32] = largest[i];
  __syncthreads();
  if (threadIdx.x >= 32 || column >= channels) return;
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    for (int warp = 1; warp < kThreads / 32; ++warp) largest[i] = max_nan(largest[i], shared[warp][i * 32 + threadIdx.x]);
    partial[blockIdx.y * channels + column + i] = largest[i];
  }
}

__global__ void __launch_bounds__(kThreads) join_slabs(FixedPointCode code, const float* partial, int slabs,
                                                       int64_t channels, uint16_t* scales) {
  const int64_t channel = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (channel >= channels) return;
  float largest = 0.0f;
#pragma unroll 8
  for (int slab = 0; slab < slabs; ++slab) largest = max_nan(largest, partial[slab * channels + channel]);
  scales[channel] = code.scale_of(largest);
}

// Eight channels a thread, a few rows each; the channels are a multiple of eight.
__global__ void __launch_bounds__(kThreads) quantize_columns(FixedPointCode code, const void* x, DType dtype,
                                                             int64_t rows, int64_t channels, const uint16_t* scales,
                                                             uint8_t* codes) {
  extern __shared__ uint8_t staging[];
  const int bits = code.bits(), lane = threadIdx.x % 32;
  const int64_t column = (int64_t(blockIdx.x) * kThreads + threadIdx.x) * 8;
  const int64_t first = (int64_t(gridDim.y) - 1 - blockIdx.y) * kRowsAThread;
  const bool valid = column < channels;
  float v[kRowsAThread][8];
#pragma unroll
  for (int r = 0; r < kRowsAThread; ++r)
    if (valid && first + r < rows) load_chunk(x, dtype, ((first + r) * channels + column) / 8, 8, true, v[r]);
  float step[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) step[i] = valid ? code.step(scales[column + i]) : 0.0f;
  uint8_t* stage = staging + threadIdx.x / 32 * 256;
  const int64_t warp_column = column - lane * 8;
  const int bytes = int(max(int64_t(0), min(int64_t(32), (channels - warp_column) / 8))) * bits;
#pragma unroll
  for (int r = 0; r < kRowsAThread; ++r) {
    if (first + r >= rows) break;
    uint32_t out[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) out[i] = code.encode(v[r][i] * step[i]);
    const int64_t chunk = ((first + r) * channels + column) / 8;
    if (bits > 8 || bits % 4 == 0) {
      if (valid) store_codes(codes, rows * channels, chunk, 8, bits, out);
      continue;
    }
    store_stream(stage + lane * bits, pack_chunk(out, bits), bits);
    __syncwarp();
    uint8_t* target = codes + (chunk - lane) * bits;
    if (reinterpret_cast<uintptr_t>(target) % 4 == 0 && bytes % 4 == 0) {
      for (int i = lane; i < bytes / 4; i += 32)
        reinterpret_cast<uint32_t*>(target)[i] = reinterpret_cast<const uint32_t*>(stage)[i];
    } else {
      for (int i = lane; i < bytes; i += 32) target[i] = stage[i];
    }
    __syncwarp();
  }
}

// Any number of channels, any address.
__global__ void __launch_bounds__(kThreads) quantize_flat(FixedPointCode code, const void* x, DType dtype,
                                                          int64_t numel, int64_t channels, const uint16_t* scales,
                                                          uint8_t* codes) {
  const int64_t chunk = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  const int count = int(min(int64_t(8), numel - chunk * 8));
  if (count <= 0) return;
  uint32_t out[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int64_t index = chunk * 8 + i;
    out[i] = i < count ? code.encode(read_item(x, dtype, index) * code.step(scales[index % channels])) : 0u;
  }
  store_codes(codes, numel, chunk, count, code.bits(), out);
}

template <bool kWholeChunks>
__global__ void __launch_bounds__(kThreads) decode_columns(FixedPointCode code, ScaledPayloads p, void* out,
                                                           DType dtype, int64_t numel, int64_t channels,
                                                           bool aligned) {
  const float limit = p.ranks == 1 ? largest_finite(dtype) : kFloatMax;
#pragma unroll
  for (int u = 0; u < 4; ++u) {
    const int64_t chunk = (int64_t(blockIdx.x) * 4 + u) * kThreads + threadIdx.x;
    const int count = int(min(int64_t(8), numel - chunk * 8));
    if (count <= 0) return;
    const int64_t column = chunk * 8 % channels;
    float total[8];
    for (int rank = 0; rank < p.ranks; ++rank) {
      uint32_t codes[8];
      load_codes(p.codes.data + rank * p.codes.stride, numel, chunk, count, code.bits(), codes);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int64_t index = kWholeChunks ? column + i : (column + i) % channels;
        const float part =
            i < count ? saturate(code.decode(codes[i]) * code.factor(scale_at<FixedPointCode>(p, rank, index)), limit)
                      : 0.0f;
        total[i] = rank ? total[i] + part : part;
      }
    }
    store_chunk(out, dtype, chunk, count, aligned, total);
  }
}

unsigned blocks_of(int64_t items, int64_t per_block) { return unsigned((items + per_block - 1) / per_block); }

}  // namespace

int channel_partials(int64_t rows) {
  const int64_t slabs = (rows + 63) / 64;
  return int(slabs < kMaxSlabs ? slabs : kMaxSlabs);
}

void channel_encode(const void* x, DType dtype, int64_t rows, int64_t channels, uint8_t* codes, void* scales, int bits,
                    float* partial, cudaStream_t stream) {
  const FixedPointCode code(bits);
  auto* out = static_cast<uint16_t*>(scales);
  const bool fast = channels % 8 == 0 && is_aligned_16(x);
  const int slabs = channel_partials(rows);
  const dim3 grid(blocks_of(channels, fast ? 256 : 32), slabs);
  const auto largest = fast ? slab_largest<8> : slab_largest<1>;
  largest<<<grid, kThreads, 0, stream>>>(x, dtype, rows, channels, rows_of_slab(rows), partial);
  join_slabs<<<blocks_of(channels, kThreads), kThreads, 0, stream>>>(code, partial, slabs, channels, out);
  const int64_t row_blocks = (rows + kRowsAThread - 1) / kRowsAThread;
  if (fast && row_blocks <= 65535) {
    quantize_columns<<<dim3(blocks_of(channels, 8 * kThreads), unsigned(row_blocks)), kThreads, kThreads * 8,
                       stream>>>(code, x, dtype, rows, channels, out, codes);
  } else {
    quantize_flat<<<blocks_of(rows * channels, 8 * kThreads), kThreads, 0, stream>>>(code, x, dtype, rows * channels,
                                                                                    channels, out, codes);
  }
}

void channel_decode(ScaledPayloads payloads, void* out, DType dtype, int64_t rows, int64_t channels, int bits,
                    cudaStream_t stream) {
  const auto decode = channels % 8 == 0 ? decode_columns<true> : decode_columns<false>;
  decode<<<blocks_of(rows * channels, 8 * kThreads * 4), kThreads, 0, stream>>>(
      FixedPointCode(bits), payloads, out, dtype, rows * channels, channels, is_aligned_16(out));
}

}  // namespace megatron_compress
