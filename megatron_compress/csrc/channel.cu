// fixed_point with a scale per channel. To encode, a tensor of rows by channels is read twice, backwards the second time,
// so that what the cache still holds of the first pass is not fetched again.
#include "scaled_codes.cuh"

namespace megatron_compress {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kMaxSlabs = 64;
constexpr int kRowsAThread = 4;

// Largest magnitudes of the rows of a slab (blockIdx.y), for kColumns neighbouring channels a thread.
template <int kColumns>
__global__ void __launch_bounds__(kThreads) slab_largest(const void* x, DType dtype, int64_t rows, int64_t channels,
                                                         int64_t slab_rows, float* partial) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t column = (int64_t(blockIdx.x) * 32 + lane) * kColumns;
  const int64_t begin = blockIdx.y * slab_rows, end = min(rows, begin + slab_rows);
  float largest[kColumns] = {};
  if (column < channels) {
#pragma unroll 4
    for (int64_t row = begin + warp; row < end; row += kWarps) {
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
  __shared__ float shared[kWarps][32 * kColumns];
#pragma unroll
  for (int i = 0; i < kColumns; ++i) shared[warp][i * 32 + lane] = largest[i];
  __syncthreads();
  if (warp > 0 || column >= channels) return;
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    for (int other = 1; other < kWarps; ++other) largest[i] = max_nan(largest[i], shared[other][i * 32 + lane]);
    partial[blockIdx.y * channels + column + i] = largest[i];
  }
}

// 32 channels a block, the slabs shared out among its warps. The first slab's place gets the steps of the scales.
template <class Code>
__global__ void __launch_bounds__(kThreads) join_slabs(float* partial, int slabs, int64_t channels, uint16_t* scales) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t channel = int64_t(blockIdx.x) * 32 + lane;
  float largest = 0.0f;
  if (channel < channels) {
#pragma unroll 8
    for (int slab = warp; slab < slabs; slab += kWarps) largest = max_nan(largest, partial[slab * channels + channel]);
  }
  __shared__ float shared[kWarps][32];
  shared[warp][lane] = largest;
  __syncthreads();
  if (warp > 0 || channel >= channels) return;
  for (int other = 1; other < kWarps; ++other) largest = max_nan(largest, shared[other][lane]);
  scales[channel] = Code::scale_of(largest);
  partial[channel] = Code::step(scales[channel]);
}

// Eight channels a thread, a few rows each; the channels are a multiple of eight.
template <class Code>
__global__ void __launch_bounds__(kThreads, 4) quantize_columns(const void* x, DType dtype, int64_t rows,
                                                             int64_t channels, const float* steps, uint8_t* codes) {
  constexpr int B = Code::kBits;
  constexpr bool kStaged = B < 8 && B != 4;
  __shared__ alignas(8) uint8_t staging[kStaged ? kThreads * B : 1];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t column = (int64_t(blockIdx.x) * kThreads + threadIdx.x) * 8;
  const int64_t first = (int64_t(gridDim.y) - 1 - blockIdx.y) * kRowsAThread;
  const bool valid = column < channels;
  float v[kRowsAThread][8];
#pragma unroll
  for (int r = 0; r < kRowsAThread; ++r)
    load_chunk(x, dtype, ((first + r) * channels + column) / 8, valid && first + r < rows ? 8 : 0, true, v[r]);
  float step[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) step[i] = valid ? steps[column + i] : 0.0f;
  bool finite = true;
#pragma unroll
  for (int i = 0; i < 8; ++i) finite &= step[i] == step[i];
  uint8_t* stage = staging + (kStaged ? warp * 32 * B : 0);
  const int bytes = int(max(int64_t(0), min(int64_t(32), channels / 8 - (column / 8 - lane)))) * B;
#pragma unroll
  for (int r = 0; r < kRowsAThread; ++r) {
    if (first + r >= rows) break;
    quantize_chunk<Code>(v[r], step, finite, dtype == DType::kFloat32 ? kFloatMax : 0.0f);
    const Codes out = Code::encode(v[r]);
    const int64_t chunk = ((first + r) * channels + column) / 8;
    if constexpr (kStaged) {
      store_stream<B>(stage + lane * B, out.low, B);
      __syncwarp();
      uint8_t* target = codes + (chunk - lane) * B;
      if (reinterpret_cast<uintptr_t>(target) % 4 == 0 && bytes % 4 == 0) {
        for (int i = lane; i < bytes / 4; i += 32)
          reinterpret_cast<uint32_t*>(target)[i] = reinterpret_cast<const uint32_t*>(stage)[i];
      } else {
        for (int i = lane; i < bytes; i += 32) target[i] = stage[i];
      }
      __syncwarp();
    } else {
      if (valid) store_codes<B>(codes, rows * channels, chunk, 8, out);
    }
  }
}

// Any number of channels, any address.
template <class Code>
__global__ void __launch_bounds__(kThreads) quantize_flat(const void* x, DType dtype, int64_t numel, int64_t channels,
                                                          const float* steps, uint8_t* codes) {
  quantize_slowly<Code>(x, dtype, numel, int64_t(blockIdx.x) * kThreads + threadIdx.x,
                        [&](int64_t i) { return steps[i % channels]; }, codes);
}

// Eight channels a thread, a few rows each; the channels are a multiple of eight.
template <class Code, bool kSum>
__global__ void __launch_bounds__(kThreads) decode_columns(ScaledPayloads p, void* out, DType dtype, int64_t rows,
                                                           int64_t channels, bool aligned) {
  const float limit = kSum ? kFloatMax : largest_finite(dtype);
  const int64_t column = (int64_t(blockIdx.x) * kThreads + threadIdx.x) * 8, first = int64_t(blockIdx.y) * kRowsAThread;
  if (column >= channels) return;
  const auto chunk = [&](int r) { return (min(first + r, rows - 1) * channels + column) / 8; };
  float total[kRowsAThread][8];
  for (int rank = 0; rank < (kSum ? p.ranks : 1); ++rank) {
    Codes codes[kRowsAThread];
#pragma unroll
    for (int r = 0; r < kRowsAThread; ++r)
      codes[r] = load_codes<Code::kBits>(p.codes.data + rank * p.codes.stride, rows * channels, chunk(r), 8);
    float factor[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) factor[i] = Code::factor(scale_at<Code>(p, rank, column + i));
    const bool inside = fits<Code>(factor, limit);
#pragma unroll
    for (int r = 0; r < kRowsAThread; ++r) {
      float v[8];
      Code::decode(codes[r], v);
      scale_chunk(v, factor, inside, limit);
#pragma unroll
      for (int i = 0; i < 8; ++i) total[r][i] = kSum && rank ? total[r][i] + v[i] : v[i];
    }
  }
#pragma unroll
  for (int r = 0; r < kRowsAThread; ++r)
    if (first + r < rows) store_chunk(out, dtype, chunk(r), 8, aligned, total[r]);
}

constexpr int64_t kMaxRows = int64_t(65535) * kRowsAThread;  // a grid's

dim3 columns_grid(int64_t rows, int64_t channels) {
  return dim3(blocks_of(channels, 8 * kThreads), blocks_of(rows, kRowsAThread));
}

}  // namespace

int channel_partials(int64_t rows) {
  const int64_t slabs = (rows + 63) / 64;
  return int(slabs < kMaxSlabs ? slabs : kMaxSlabs);
}

void channel_encode(const void* x, DType dtype, int64_t rows, int64_t channels, uint8_t* codes, void* scales, int bits,
                    float* partial, cudaStream_t stream) {
  auto* out = static_cast<uint16_t*>(scales);
  const bool fast = channels % 8 == 0 && is_aligned_16(x);
  const int slabs = channel_partials(rows);
  const auto largest = fast ? slab_largest<8> : slab_largest<1>;
  largest<<<dim3(blocks_of(channels, fast ? 256 : 32), slabs), kThreads, 0, stream>>>(
      x, dtype, rows, channels, (rows + slabs - 1) / slabs, partial);
  with_code(bits, [&](auto code) {
    using Code = decltype(code);
    if constexpr (std::is_same_v<typename Code::Scale, uint16_t>) {
      join_slabs<Code><<<blocks_of(channels, 32), kThreads, 0, stream>>>(partial, slabs, channels, out);
      if (fast && rows <= kMaxRows) {
        quantize_columns<Code><<<columns_grid(rows, channels), kThreads, 0, stream>>>(x, dtype, rows, channels, partial,
                                                                                     codes);
      } else {
        quantize_flat<Code><<<blocks_of(rows * channels, 8 * kThreads), kThreads, 0, stream>>>(
            x, dtype, rows * channels, channels, partial, codes);
      }
    }
  });
}

void channel_decode(ScaledPayloads payloads, void* out, DType dtype, int64_t rows, int64_t channels, int bits,
                    cudaStream_t stream) {
  if (channels % 8 || rows > kMaxRows)
    return channel_decode_any(payloads, out, dtype, rows * channels, channels, bits, stream);
  with_code(bits, [&](auto code) {
    using Code = decltype(code);
    const auto kernel = payloads.ranks > 1 ? decode_columns<Code, true> : decode_columns<Code, false>;
    kernel<<<columns_grid(rows, channels), kThreads, 0, stream>>>(payloads, out, dtype, rows, channels,
                                                                  is_aligned_16(out));
  });
}

}  // namespace megatron_compress
