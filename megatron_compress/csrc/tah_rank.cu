// Ranking keys of windows: the entropy of their magnitudes (ops/entropy.py), in 12 bits.
#include "tah_quant.cuh"

namespace megatron_compress::tah {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
constexpr float kRankHeadroom = 0x1p-17f;
constexpr float kMinSum = 0x1p-120f;
// As in ops/entropy.py.
constexpr float kLog2Slope = -0.15922019f / 256;
constexpr float kLog2Offset = 0.58208556f / 256;

__device__ __forceinline__ int exponent_bits(float x) { return __float_as_int(x) & 0x7f800000; }

// log2 of positive x, less that of the power of two whose bits are `base`, in units of 256: the bits as an integer are
// it but for a curve of the mantissa.
__device__ __forceinline__ float log2_from(float x, int base) {
  const float mantissa = __int_as_float((__float_as_int(x) & 0x7fffff) | 0x3f800000);
  const float curve = ((mantissa - 1.0f) * (2.0f - mantissa)) * (mantissa * kLog2Slope + kLog2Offset);
  return __fmaf_rn(__int2float_rn(__float_as_int(x) - base), 0x1p-31f, curve);
}

// Magnitudes, and magnitudes times their logarithms from the exponent of the sum on, summed over a tile.
struct Sums {
  float magnitude, weighted;
};

__device__ __forceinline__ uint32_t key_of(Sums window, float key_scale) {
  const float entropy = log2_from(window.magnitude, exponent_bits(window.magnitude)) -
                        window.weighted * __frcp_rn(max_nan(window.magnitude, kMinSum));
  return uint32_t(fminf(fmaxf(entropy * key_scale, 0.0f), float(kKeys - 1)));
}

// Store a window's key and count it; every lane calls it, `present` says whose windows exist.
__device__ __forceinline__ void record(uint32_t sample, uint32_t local, uint32_t key, bool present, const TahTiling& t,
                                       uint16_t* keys, uint32_t* histogram) {
  if (present) keys[sample * (t.words() * 32) + local] = uint16_t(key);
  // Windows of one tensor have like entropies: add once for all lanes that agree.
  const uint32_t bin = present ? sample * kKeys + key : 0xffffffffu;
  const unsigned alike = __match_any_sync(kAllLanes, bin);
  if (present && (threadIdx.x % 32) == __ffs(alike) - 1) atomicAdd(histogram + bin, __popc(alike));
}

template <int G, int kItem>
__global__ void __launch_bounds__(kThreads) rank_tiles(const uint8_t* x, DType dtype, TahTiling t, float key_scale,
                                                       uint16_t* keys, uint32_t* histogram, Sums* sums, bool aligned) {
  constexpr int N = Geometry<G>::kRow, kLanes = Geometry<G>::kLanes;
  using Rows = WarpRows<N * kItem>;
  __shared__ alignas(16) uint8_t shared[kWarps * Rows::kSharedBytes];
  const int lane = threadIdx.x % 32;
  const int64_t first = int64_t(blockIdx.x) * kThreads + (threadIdx.x - lane);
  const int64_t parts = int64_t(t.all_whole_tiles()) * kLanes;
  const int rows = int(min(int64_t(32), parts - first));
  if (rows <= 0) return;
  const uint32_t part = uint32_t(min(first + lane, parts - 1));
  const Tile tile(part / kLanes, t);
  const int64_t offset = row_offset(tile.row, t) + int64_t(tile.column) * G + part % kLanes * N;
  uint8_t* stage = shared + threadIdx.x / 32 * Rows::kSharedBytes;
  Rows::load(stage, [&](int row) { return x + __shfl_sync(kAllLanes, offset, row) * kItem; }, rows, lane, aligned);
  float magnitude[N], weighted[N];
  read_row<kItem>(stage + lane * Rows::kStride, dtype, magnitude);
#pragma unroll
  for (int i = 0; i < N; ++i) magnitude[i] = fabsf(magnitude[i] * kRankHeadroom);
  Sums s{sum_across_lanes<kLanes>(pairwise_sum<N>(magnitude)), 0.0f};
  const int base = exponent_bits(s.magnitude);
#pragma unroll
  for (int i = 0; i < N; ++i) weighted[i] = magnitude[i] * log2_from(magnitude[i], base);
  s.weighted = sum_across_lanes<kLanes>(pairwise_sum<N>(weighted));
  if (!is_finite(s.magnitude)) s = {0.0f, 0.0f};
  const bool mine = lane < rows && lane % kLanes == 0;
  if (t.per_window > 1) {
    if (mine) sums[part / kLanes] = s;
    return;
  }
  const uint32_t sample = tile.row / t.rows;
  const bool ranked = mine && tile.column < t.windows;
  record(sample, (tile.row - sample * t.rows) * t.windows + tile.column, key_of(s, key_scale), ranked, t, keys,
         histogram);
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
  const uint32_t window = blockIdx.x * kThreads + threadIdx.x;
  const bool present = window < t.samples * t.sample_windows();
  const uint32_t row = present ? window / t.windows : 0, column = present ? window - row * t.windows : 0;
  const Sums* tile = sums + int64_t(row) * t.whole_tiles() + column * t.per_window;
  Sums total;
  total.magnitude = pairwise_sum_of(t.per_window, [&](uint32_t i) { return tile[i].magnitude; });
  const int base = exponent_bits(total.magnitude);
  total.weighted = pairwise_sum_of(t.per_window, [&](uint32_t i) {
    const float shift = __int2float_rn(exponent_bits(tile[i].magnitude) - base) * 0x1p-31f;
    return tile[i].weighted + tile[i].magnitude * shift;
  });
  const uint32_t sample = row / t.rows;
  record(sample, (row - sample * t.rows) * t.windows + column, key_of(total, key_scale), present, t, keys, histogram);
}

unsigned blocks_of(int64_t items) { return unsigned((items + kThreads - 1) / kThreads); }

}  // namespace

void rank_windows(const void* x, DType dtype, const TahTiling& t, uint16_t* keys, uint32_t* histogram, float2* sums,
                  cudaStream_t stream) {
  if (t.sample_windows() == 0) return;
  cudaMemsetAsync(histogram, 0, sizeof(uint32_t) * kKeys * t.samples, stream);
  const bool aligned = is_aligned_16(x) && t.channels * item_bytes(dtype) % 16 == 0;
  const float key_scale = float(256.0 * (kKeys - 1) / log2(double(t.per_window) * t.group));
  auto* pairs = reinterpret_cast<Sums*>(sums);
  with_group(t.group, [&](auto group) {
    constexpr int G = group();
    const unsigned blocks = blocks_of(int64_t(t.all_whole_tiles()) * Geometry<G>::kLanes);
    const auto kernel = item_bytes(dtype) == 4 ? rank_tiles<G, 4> : rank_tiles<G, 2>;
    kernel<<<blocks, kThreads, 0, stream>>>(static_cast<const uint8_t*>(x), dtype, t, key_scale, keys, histogram,
                                            pairs, aligned);
  });
  if (t.per_window > 1)
    rank_joined<<<blocks_of(int64_t(t.samples) * t.sample_windows()), kThreads, 0, stream>>>(t, key_scale, pairs,
                                                                                              keys, histogram);
}

}  // namespace megatron_compress::tah
