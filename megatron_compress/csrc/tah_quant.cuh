// What the kernels of compressors/tah_quant.py share: where tiles lie, and which windows are high.
#pragma once

#include "division.cuh"
#include "warp_rows.cuh"

namespace megatron_compress::tah {

template <int G>
struct Geometry {
  static constexpr int kRow = G < 64 ? G : 64;  // values a thread holds
  static constexpr int kLanes = G / kRow;       // threads that share a tile
};

// Flags of 32 windows, and how many windows of the sample before them are high.
struct Word {
  uint32_t high, before;
};

struct Tiling : TahTiling {
  Division by_whole_tiles, by_rows, by_inner, by_per_window;

  static uint32_t divisor(uint32_t count) { return count ? count : 1; }

  explicit Tiling(const TahTiling& t)
      : TahTiling(t),
        by_whole_tiles(divisor(t.whole_tiles())),
        by_rows(divisor(t.rows)),
        by_inner(divisor(t.inner)),
        by_per_window(divisor(t.per_window)) {}
};

struct Tile {
  uint32_t row, column;  // among the message's rows, sample by sample; among the row's tiles

  __device__ Tile(uint32_t index, const Tiling& t) {
    row = t.by_whole_tiles.of(index);
    column = index - row * t.whole_tiles();
  }

  // Index of its scale, zero and pivot.
  __device__ uint32_t slot(const TahTiling& t) const { return row * t.tiles() + column; }
};

// Where a row (counted sample by sample) begins in the tensor, in elements.
__device__ __forceinline__ int64_t row_offset(uint32_t row, const Tiling& t) {
  const uint32_t sample = t.by_rows.of(row), r = row - sample * t.rows;
  const uint32_t outer = t.by_inner.of(r), in = r - outer * t.inner;
  return (int64_t(outer * t.samples + sample) * t.inner + in) * t.channels;
}

struct Place {
  bool high;
  uint32_t rank;  // among the tiles of its bits, in order
};

// words: of all samples, t.words() each.
__device__ __forceinline__ Place place_of(const Tile& tile, const Tiling& t, const Word* words) {
  const uint32_t window = t.by_per_window.of(tile.column), inside = tile.column - window * t.per_window;
  const bool ranked = window < t.windows;
  const uint32_t sample = t.by_rows.of(tile.row);
  const uint32_t local = (tile.row - sample * t.rows) * t.windows + (ranked ? window : t.windows);
  const uint32_t rest = tile.row * t.rest_tiles;
  uint32_t before = 0;
  bool high = true;
  if (local < t.sample_windows()) {
    const Word word = words[sample * t.words() + local / 32];
    before = word.before + __popc(word.high & ((1u << local % 32) - 1));
    high = !ranked || (word.high >> local % 32 & 1);
  } else {
    before = t.high_per_sample;
  }
  before += sample * t.high_per_sample;
  if (!ranked) return {true, before * t.per_window + rest + tile.column - t.windows * t.per_window};
  if (high) return {true, before * t.per_window + rest + inside};
  return {false, (sample * t.sample_windows() + local - before) * t.per_window + inside};
}

// Start the copies of the lanes' rows, which begin `offset` elements of kItem bytes into x.
template <int N, int kItem>
__device__ __forceinline__ void start_rows(uint8_t* stage, const uint8_t* x, int64_t offset, int rows, int lane,
                                           bool aligned) {
  using Rows = WarpRows<N * kItem>;
  const int64_t head = __shfl_sync(kAllLanes, offset, 0);
  if (__all_sync(kAllLanes, lane >= rows || offset == head + lane * N)) {
    Rows::start_dense(stage, x + head * kItem, rows, lane, aligned);
  } else {
    Rows::start(stage, [&](int row) { return x + __shfl_sync(kAllLanes, offset, row) * kItem; }, rows, lane, aligned);
  }
}

// The code streams: a tile's G codes are G * bits / 8 whole bytes. A row's codes come as quads, words that hold four
// codes of B bits. Rows lie at multiples of N / 8 bytes, for so do the rows before them, with their own bits.
template <int B, int N>
__device__ __forceinline__ void store_quads(const uint32_t (&quads)[N / 4], uint8_t* target) {
  constexpr int kBytes = N * B / 8, kWords = (kBytes + 3) / 4;
  uint32_t words[kWords] = {};
#pragma unroll
  for (int i = 0; i < N / 4; ++i) {
    const int word = i * 4 * B / 32, shift = i * 4 * B % 32;
    words[word] |= quads[i] << shift;
    if (shift + 4 * B > 32) words[word + 1] |= quads[i] >> (32 - shift);
  }
  if constexpr (N == 64) {
#pragma unroll
    for (int i = 0; i < kWords / 2; ++i)
      reinterpret_cast<uint2*>(target)[i] = make_uint2(words[2 * i], words[2 * i + 1]);
  } else if constexpr (N == 32) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) reinterpret_cast<uint32_t*>(target)[i] = words[i];
  } else {
#pragma unroll
    for (int i = 0; i < kBytes; ++i) target[i] = uint8_t(words[i / 4] >> (i % 4 * 8));
  }
}

// Swap element 0 of a tile of kLanes threads of N values with the pivot; `mates`: lanes that call it.
template <int N, int kLanes>
__device__ __forceinline__ void swap_first(float (&v)[N], uint32_t pivot, uint32_t piece, int lane, unsigned mates) {
  float peak = 0.0f;
#pragma unroll
  for (int i = 0; i < N; ++i)
    if (pivot % N == i) peak = v[i];
  const float head = __shfl_sync(mates, v[0], lane / kLanes * kLanes);
  peak = __shfl_sync(mates, peak, lane / kLanes * kLanes + pivot / N);
#pragma unroll
  for (int i = 0; i < N; ++i)
    if (piece * N + i == pivot) v[i] = head;
  if (piece == 0) v[0] = peak;
}

// Call f with the number of bits as a constant.
template <class F>
__device__ __forceinline__ void with_bits(int bits, F f) {
  switch (bits) {
    case 2: return f(std::integral_constant<int, 2>());
    case 3: return f(std::integral_constant<int, 3>());
    case 4: return f(std::integral_constant<int, 4>());
    case 5: return f(std::integral_constant<int, 5>());
    case 6: return f(std::integral_constant<int, 6>());
    case 7: return f(std::integral_constant<int, 7>());
    case 8: return f(std::integral_constant<int, 8>());
  }
}

template <class F>
void with_group(uint32_t group, F f) {
  switch (group) {
    case 8: return f(std::integral_constant<int, 8>());
    case 16: return f(std::integral_constant<int, 16>());
    case 32: return f(std::integral_constant<int, 32>());
    case 64: return f(std::integral_constant<int, 64>());
    case 128: return f(std::integral_constant<int, 128>());
    case 256: return f(std::integral_constant<int, 256>());
  }
}

inline unsigned blocks_of(int64_t items, int threads) { return unsigned((items + threads - 1) / threads); }

// Whether every row of tiles begins at a multiple of 16 bytes.
inline bool rows_aligned(const void* x, DType dtype, const Tiling& t) {
  return is_aligned_16(x) && t.channels * item_bytes(dtype) % 16 == 0;
}

// Keys of all windows and their histogram (tah_rank.cu); sums: one for each whole tile where windows have several.
void rank_windows(const void* x, DType dtype, const Tiling& t, uint16_t* keys, uint32_t* histogram, float2* sums,
                  cudaStream_t stream);

// Set words[i] for every sample's windows (tah_select.cu).
void select_windows(const TahTiling& t, const uint16_t* keys, const uint32_t* histogram, uint4* candidates,
                    uint2* segments, uint32_t* ties, Word* words, uint8_t* high_map, cudaStream_t stream);
void read_windows(const TahTiling& t, const uint8_t* high_map, int64_t stride, int ranks, Word* words,
                  cudaStream_t stream);

constexpr int kKeys = 4096;  // ranking keys of windows: the entropy in 12 bits

// Codes in bytes to the bit stream of ops/bits.py.
void pack_bytes(const uint8_t* codes, int64_t count, int bits, uint8_t* stream_out, cudaStream_t stream);

}  // namespace megatron_compress::tah
