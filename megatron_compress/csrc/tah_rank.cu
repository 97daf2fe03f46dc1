// Ranking keys of windows: the entropy of their magnitudes (ops/entropy.py), in 12 bits.
#include "tah_quant.cuh"

namespace megatron_compress::tah {
namespace {

// Threads of a block, whose rows share memory with the counts of keys.
template <int kRowBytes>
constexpr int kThreadsFor = kRowBytes > 128 ? 64 : 128;
constexpr int kThreads = 128;
constexpr int kBlocksASm = 6;  // of rank_tiles
constexpr float kRankHeadroom = 0x1p-17f;
constexpr float kMinSum = 0x1p-120f;
// As in ops/entropy.py.
constexpr float kLog2Slope = -0.15922019f / 256;
constexpr float kLog2Offset = 0.58208556f / 256;

__device__ __forceinline__ int exponent_bits(float x) { return __float_as_int(x) & 0x7f800000; }

// log2 of positive x, linear between powers of two, less that of the power of two whose bits are `base`, in units of
// 256: the difference of the bits as integers.
__device__ __forceinline__ float log2_from(float x, int base) {
  return __int2float_rn(__float_as_int(x) - base) * 0x1p-31f;
}

// log2 of positive x / 2^e for its exponent e, in units of 256.
__device__ __forceinline__ float log2_mantissa(float x) {
  const float m = __int_as_float((__float_as_int(x) & 0x7fffff) | 0x3f800000);
  return log2_from(m, 0x3f800000) + ((m - 1.0f) * (2.0f - m)) * (m * kLog2Slope + kLog2Offset);
}

// Magnitudes, and magnitudes times their logarithms from the exponent of the sum on, summed over a tile.
struct Sums {
  float magnitude, weighted;
};

__device__ __forceinline__ uint32_t key_of(Sums window, float key_scale) {
  const float entropy = log2_mantissa(window.magnitude) -
                        window.weighted * __frcp_rn(max_nan(window.magnitude, kMinSum));
  return uint32_t(fminf(fmaxf(entropy * key_scale, 0.0f), float(kKeys - 1)));
}

// Count keys of one sample in shared memory, then add what was counted to the sample's histogram.
__device__ __forceinline__ void flush(uint32_t* counts, uint32_t* histogram) {
  __syncthreads();
  for (int i = threadIdx.x; i < kKeys; i += blockDim.x)
    if (counts[i]) atomicAdd(histogram + i, counts[i]);
}

__device__ __forceinline__ void clear(uint32_t* counts) {
  for (int i = threadIdx.x; i < kKeys; i += blockDim.x) counts[i] = 0;
  __syncthreads();
}

// blockIdx.y is the sample; blocks walk over its tiles.
template <int G, int kItem>
__global__ void __launch_bounds__(kThreadsFor<Geometry<G>::kRow * kItem>, kItem == 2 ? kBlocksASm : 3)
    rank_tiles(const uint8_t* x, DType dtype, Tiling t, float key_scale, uint16_t* keys, uint32_t* histogram, Sums* sums,
               bool aligned) {
  constexpr int N = Geometry<G>::kRow, kLanes = Geometry<G>::kLanes;
  constexpr int kBlock = kThreadsFor<N * kItem>;
  using Rows = WarpRows<N * kItem>;
  __shared__ alignas(16) uint8_t shared[kBlock / 32 * Rows::kSharedBytes];
  __shared__ uint32_t counts[kKeys];
  clear(counts);
  const int lane = threadIdx.x % 32;
  const uint32_t sample = blockIdx.y, parts = t.rows * t.whole_tiles() * kLanes;
  uint8_t* stage = shared + threadIdx.x / 32 * Rows::kSharedBytes;
  for (uint32_t first = blockIdx.x * kBlock + (threadIdx.x - lane); first < parts; first += gridDim.x * kBlock) {
    const int rows = int(min(32u, parts - first));
    const uint32_t part = min(first + lane, parts - 1);
    const Tile tile(sample * t.rows * t.whole_tiles() + part / kLanes, t);
    const int64_t offset = row_offset(tile.row, t) + int64_t(tile.column) * G + part % kLanes * N;
    start_rows<N, kItem>(stage, x, offset, rows, lane, aligned);
    Rows::finish();
    // Chunks of eight are subtrees of the sums; they are read twice, so that few registers are held.
    const uint8_t* row = stage + lane * Rows::kStride;
    float v[8], sums_of_eight[N / 8];
#pragma unroll
    for (int c = 0; c < N / 8; ++c) {
      read_row<kItem>(row + c * 8 * kItem, dtype, v);
#pragma unroll
      for (int i = 0; i < 8; ++i) v[i] = fabsf(v[i] * kRankHeadroom);
      sums_of_eight[c] = pairwise_sum<8>(v);
    }
    Sums s{sum_across_lanes<kLanes>(pairwise_sum<N / 8>(sums_of_eight)), 0.0f};
    const int base = exponent_bits(s.magnitude);
#pragma unroll
    for (int c = 0; c < N / 8; ++c) {
      read_row<kItem>(row + c * 8 * kItem, dtype, v);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float magnitude = fabsf(v[i] * kRankHeadroom);
        v[i] = magnitude * log2_from(magnitude, base);
      }
      sums_of_eight[c] = pairwise_sum<8>(v);
    }
    s.weighted = sum_across_lanes<kLanes>(pairwise_sum<N / 8>(sums_of_eight));
    __syncwarp();  // the rows may be overwritten now
    if (!is_finite(s.magnitude)) s = {0.0f, 0.0f};
    if (lane >= rows || lane % kLanes) continue;
    if (t.per_window > 1) {
      sums[tile.row * t.whole_tiles() + tile.column] = s;
    } else if (tile.column < t.windows) {
      const uint32_t key = key_of(s, key_scale);
      keys[sample * (t.words() * 32) + (tile.row - sample * t.rows) * t.windows + tile.column] = uint16_t(key);
      atomicAdd(counts + key, 1);
    }
  }
  if (t.per_window == 1) flush(counts, histogram + int64_t(sample) * kKeys);
}

// Sum of value(0) to value(n - 1) by the tree of adjacent pairs, kept as a binary counter of partial sums.
template <class Value>
__device__ float pairwise_sum_of(uint32_t n, Value value) {
  float level[17];
  for (uint32_t i = 0; i < n; ++i) {
    float sum = value(i);
    int k = 0;
    for (; i >> k & 1; ++k) sum = level[k] + sum;
    level[k] = sum;
  }
  float total = 0.0f;
  for (int k = 0; n >> k; ++k)
    if (n >> k & 1) total = level[k] + total;
  return total;
}

// Windows of several tiles.
__global__ void __launch_bounds__(kThreads) rank_joined(TahTiling t, float key_scale, const Sums* sums,
                                                        uint16_t* keys, uint32_t* histogram) {
  __shared__ uint32_t counts[kKeys];
  clear(counts);
  const uint32_t sample = blockIdx.y;
  for (uint32_t local = blockIdx.x * kThreads + threadIdx.x; local < t.sample_windows();
       local += gridDim.x * kThreads) {
    const uint32_t row = sample * t.rows + local / t.windows, column = local % t.windows;
    const Sums* tile = sums + int64_t(row) * t.whole_tiles() + column * t.per_window;
    Sums total;
    total.magnitude = pairwise_sum_of(t.per_window, [&](uint32_t i) { return tile[i].magnitude; });
    const int base = exponent_bits(total.magnitude);
    total.weighted = pairwise_sum_of(t.per_window, [&](uint32_t i) {
      const float shift = __int2float_rn(exponent_bits(tile[i].magnitude) - base) * 0x1p-31f;
      return tile[i].weighted + tile[i].magnitude * shift;
    });
    const uint32_t key = key_of(total, key_scale);
    keys[sample * (t.words() * 32) + local] = uint16_t(key);
    atomicAdd(counts + key, 1);
  }
  flush(counts, histogram + int64_t(sample) * kKeys);
}

int multiprocessors() {
  int device = 0, count = 1;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  return count;
}

// Blocks for a sample's share of `items`: enough to fill a GPU, few enough that clearing and adding counts is little.
dim3 grid_of(int64_t items, uint32_t samples, int threads) {
  const int64_t blocks = int64_t(multiprocessors()) * kBlocksASm;
  const int64_t needed = (items + threads - 1) / threads, most = (blocks + samples - 1) / samples;
  return dim3(unsigned(needed < most ? needed : most), samples);
}

}  // namespace

void rank_windows(const void* x, DType dtype, const Tiling& t, uint16_t* keys, uint32_t* histogram, float2* sums,
                  cudaStream_t stream) {
  if (t.sample_windows() == 0) return;
  cudaMemsetAsync(histogram, 0, sizeof(uint32_t) * kKeys * t.samples, stream);
  const bool aligned = rows_aligned(x, dtype, t);
  const float key_scale = float(256.0 * (kKeys - 1) / log2(double(t.per_window) * t.group));
  auto* pairs = reinterpret_cast<Sums*>(sums);
  with_group(t.group, [&](auto group) {
    constexpr int G = group();
    const bool wide = item_bytes(dtype) == 4;
    const int threads = wide ? kThreadsFor<Geometry<G>::kRow * 4> : kThreadsFor<Geometry<G>::kRow * 2>;
    const dim3 grid = grid_of(int64_t(t.rows) * t.whole_tiles() * Geometry<G>::kLanes, t.samples, threads);
    const auto kernel = wide ? rank_tiles<G, 4> : rank_tiles<G, 2>;
    kernel<<<grid, threads, 0, stream>>>(static_cast<const uint8_t*>(x), dtype, t, key_scale, keys, histogram, pairs,
                                          aligned);
  });
  if (t.per_window > 1)
    rank_joined<<<grid_of(t.sample_windows(), t.samples, kThreads), kThreads, 0, stream>>>(t, key_scale, pairs, keys, histogram);
}

}  // namespace megatron_compress::tah
