// Encode of compressors/tah_quant.py: quantize tiles whose bits are known, and the order of all launches.
#include "block.cuh"
#include "tah_range.cuh"

namespace megatron_compress {
namespace tah {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
struct Out {
  TahPayload payload;
  uint8_t *pivots, *short_codes;  // one byte each, where bit streams are packed by a later launch
};

__device__ __forceinline__ void store_tile(const Out& out, uint32_t slot, const Range& r, bool finite, bool rotated) {
  const uint16_t scale = bfloat16_bits(r.scale);
  reinterpret_cast<uint16_t*>(out.payload.scales)[slot] = finite ? (rotated ? scale | 0x8000 : scale) : 0x7fc0;
  reinterpret_cast<uint16_t*>(out.payload.zeros)[slot] = finite ? bfloat16_bits(r.zero) : 0x7fc0;
}

// Eight neighbouring lanes hold the pivots of eight tiles, which are pivot_bits bytes.
__device__ __forceinline__ void store_pivots(uint8_t* stream, uint32_t slot, uint32_t pivot, int bits, bool valid) {
  const int lane = threadIdx.x % 8;
  uint32_t low = valid ? pivot << (bits * (lane % 4)) : 0;  // four pivots of up to 8 bits
  low |= __shfl_xor_sync(kAllLanes, low, 1);
  low |= __shfl_xor_sync(kAllLanes, low, 2);
  const uint32_t other = __shfl_xor_sync(kAllLanes, low, 4);
  const uint64_t word = lane < 4 ? low | uint64_t(other) << (4 * bits) : other | uint64_t(low) << (4 * bits);
  const unsigned present = __ballot_sync(kAllLanes, valid) >> (threadIdx.x % 32 / 8 * 8) & 0xff;
  if (lane < (__popc(present) * bits + 7) / 8) stream[slot / 8 * bits + lane] = uint8_t(word >> (8 * lane));
}

// Swap the pivot with element 0 and transform a tile of kLanes neighbouring threads; returns the pivot.
template <int G, int N, int kLanes>
__device__ __forceinline__ uint32_t rotate(float (&v)[N], float largest, uint32_t piece, int lane, unsigned mates) {
  uint32_t pivot = G;
#pragma unroll
  for (int i = N - 1; i >= 0; --i)
    if (fabsf(v[i]) == largest) pivot = piece * N + i;
#pragma unroll
  for (int distance = 1; distance < kLanes; distance *= 2)
    pivot = min(pivot, __shfl_xor_sync(mates, pivot, distance));
  swap_first<N, kLanes>(v, pivot, piece, lane, mates);
  hadamard_in_thread<N>(v);
  hadamard_across_lanes<N, kLanes>(v, lane, mates);
#pragma unroll
  for (int i = 0; i < N; ++i) v[i] *= 1.0f / G;
  return pivot;
}

template <int kItem, int N>
__device__ __forceinline__ Extremes read_extremes(const uint8_t* row, DType dtype) {
  if constexpr (kItem == 4) {
    float v[N];
    read_row<4>(row, dtype, v);
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] *= kHeadroom;
    return extremes_of(v);
  } else {
    uint32_t words[N / 2];
#pragma unroll
    for (int i = 0; i < N / 8; ++i) {
      const uint4 four = reinterpret_cast<const uint4*>(row)[i];
      words[4 * i] = four.x, words[4 * i + 1] = four.y, words[4 * i + 2] = four.z, words[4 * i + 3] = four.w;
    }
    return dtype == DType::kBFloat16 ? extremes_of_pairs<__nv_bfloat162, DType::kBFloat16>(words)
                                      : extremes_of_pairs<__half2, DType::kFloat16>(words);
  }
}

template <int G, int kItem>
__global__ void __launch_bounds__(kThreads, kItem == 2 ? 6 : 3)
    quantize_tiles(const uint8_t* x, DType dtype, Tiling t, const Word* words, Out out, bool aligned) {
  constexpr int N = Geometry<G>::kRow, kLanes = Geometry<G>::kLanes;
  using Rows = WarpRows<N * kItem>;
  __shared__ alignas(16) uint8_t shared[kWarps * Rows::kSharedBytes];
  const int lane = threadIdx.x % 32;
  // Backwards: what the cache still holds of the first pass is the end.
  const int64_t first = int64_t(gridDim.x - 1 - blockIdx.x) * kThreads + (threadIdx.x - lane);
  const int64_t parts = int64_t(t.all_whole_tiles()) * kLanes;
  const int rows = int(min(int64_t(32), parts - first));
  if (rows <= 0) return;
  const uint32_t part = uint32_t(min(first + lane, parts - 1)), piece = part % kLanes;
  const Tile tile(part / kLanes, t);
  const int64_t offset = row_offset(tile.row, t) + int64_t(tile.column) * G + piece * N;
  uint8_t* stage = shared + threadIdx.x / 32 * Rows::kSharedBytes;
  start_rows<N, kItem>(stage, x, offset, rows, lane, aligned);
  const Place place = place_of(tile, t, words);
  Rows::finish();
  const uint8_t* mine = stage + lane * Rows::kStride;
  Extremes e = across_lanes<kLanes>(read_extremes<kItem, N>(mine, dtype));
  const bool finite = is_finite(e.largest);
  const bool rotated = finite && e.largest > t.threshold * e.second && t.threshold <= kFloatMax;
  const unsigned mates = ((1u << kLanes) - 1) << (lane / kLanes * kLanes);
  const int bits = place.high ? t.high_bits : t.low_bits;
  const Quad quad(bits);
  uint32_t quads[N / 4], pivot = 0;
  Range r;
  if (rotated) {
    float v[N];
    read_row<kItem>(mine, dtype, v);
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] *= kHeadroom;
    pivot = rotate<G, N, kLanes>(v, e.largest, piece, lane, mates);
    e.low = e.high = v[0];
#pragma unroll
    for (int i = 1; i < N; ++i) {
      e.low = fminf(e.low, v[i]);
      e.high = fmaxf(e.high, v[i]);
    }
#pragma unroll
    for (int distance = 1; distance < kLanes; distance *= 2) {
      e.low = fminf(e.low, __shfl_xor_sync(mates, e.low, distance));
      e.high = fmaxf(e.high, __shfl_xor_sync(mates, e.high, distance));
    }
    r = range_of(e.low, e.high, true, bits);
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] -= r.reference;
#pragma unroll
    for (int i = 0; i < N / 4; ++i) quads[i] = quad.of(v + 4 * i, r);
  } else {
    r = finite ? range_of(e.low, e.high, false, bits) : Range{0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int c = 0; c < N / 8; ++c) {
      float v[8];
      read_row<kItem>(mine + c * 8 * kItem, dtype, v);
#pragma unroll
      for (int i = 0; i < 8; ++i)  // the product is exact for 16-bit floats, so it may be fused
        v[i] = kItem == 2 ? __fmaf_rn(v[i], kHeadroom, -r.reference) : v[i] * kHeadroom - r.reference;
      quads[2 * c] = quad.of(v, r);
      quads[2 * c + 1] = quad.of(v + 4, r);
    }
  }
  if (lane < rows) {
    uint8_t* target = (place.high ? out.payload.high_codes : out.payload.low_codes) +
                      (int64_t(place.rank) * kLanes + piece) * (N / 8 * bits);
    with_bits(bits, [&](auto constant) { store_quads<decltype(constant)::value, N>(quads, target); });
    if (piece == 0) store_tile(out, tile.slot(t), r, finite, rotated);
  }
  if (out.pivots) {
    if (lane < rows && piece == 0) out.pivots[tile.slot(t)] = uint8_t(pivot);
    return;
  }
  // No short tiles: slots follow each other, and a warp's first one is a multiple of eight.
  const uint32_t of_tile = __shfl_sync(kAllLanes, pivot, lane * kLanes % 32);
  store_pivots(out.payload.pivots, uint32_t(first / kLanes) + lane, of_tile, t.pivot_bits(), lane < rows / kLanes);
}

// A row's last tile of t.short_length elements, by a block; rotated only if that is a power of two.
__global__ void __launch_bounds__(kThreads) quantize_short(const uint8_t* x, DType dtype, Tiling t, Out out) {
  __shared__ float v[kMaxTail];
  const uint32_t row = blockIdx.x, length = t.short_length;
  const int64_t offset = row_offset(row, t) + int64_t(t.whole_tiles()) * t.group;
  for (uint32_t i = threadIdx.x; i < length; i += kThreads) v[i] = read_item(x, dtype, offset + i) * kHeadroom;
  __syncthreads();
  float largest = 0.0f, second = 0.0f;
  uint32_t pivot = 0;
  for (uint32_t i = 0; i < length; ++i) {
    const float magnitude = fabsf(v[i]);
    if (magnitude > largest) pivot = i;
    second = fmaxf(second, fminf(largest, magnitude));
    largest = max_nan(largest, magnitude);
  }
  const bool finite = is_finite(largest);
  const bool whole = length > 1 && (length & (length - 1)) == 0 && t.threshold <= kFloatMax;
  const bool rotated = finite && whole && largest > t.threshold * second;
  __syncthreads();
  if (rotated) {
    if (threadIdx.x == 0) {
      const float head = v[0];
      v[0] = v[pivot];
      v[pivot] = head;
    }
    hadamard_in_block(v, length, length);
    for (uint32_t i = threadIdx.x; i < length; i += kThreads) v[i] *= 1.0f / length;
    __syncthreads();
  }
  float low = finite ? v[0] : 0.0f, high = low;
  for (uint32_t i = 1; finite && i < length; ++i) {
    low = fminf(low, v[i]);
    high = fmaxf(high, v[i]);
  }
  const Range r = range_of(low, high, rotated, t.high_bits);
  for (uint32_t i = threadIdx.x; i < length; i += kThreads)
    out.short_codes[int64_t(row) * length + i] = finite ? uint8_t(rounded(v[i] - r.reference, r)) : 0;
  if (threadIdx.x == 0) {
    const uint32_t slot = row * t.tiles() + t.whole_tiles();
    store_tile(out, slot, r, finite, rotated);
    out.pivots[slot] = rotated ? uint8_t(pivot) : 0;
  }
}

// Carves a workspace; a null base measures it.
struct Workspace {
  uint8_t* base;
  int64_t used = 0;

  template <class T>
  T* take(int64_t count) {
    T* start = reinterpret_cast<T*>(base + used);
    used += (count * int64_t(sizeof(T)) + 15) / 16 * 16;
    return start;
  }
};

struct EncodeBuffers {
  uint32_t* histogram;
  uint16_t* keys;
  float2* sums;
  uint4* candidates;
  uint2* segments;
  uint32_t* ties;
  Word* words;
  uint8_t *pivots, *short_codes;
  int64_t bytes;

  EncodeBuffers(const TahTiling& t, uint8_t* base) {
    Workspace w{base};
    const int64_t words_all = int64_t(t.samples) * t.words();
    histogram = w.take<uint32_t>(int64_t(t.samples) * kKeys);
    keys = w.take<uint16_t>(words_all * 32);
    sums = w.take<float2>(t.per_window > 1 ? t.all_whole_tiles() : 0);
    candidates = w.take<uint4>(words_all);
    segments = w.take<uint2>(words_all);
    ties = w.take<uint32_t>(t.samples);
    words = w.take<Word>(words_all);
    pivots = w.take<uint8_t>(t.short_length ? int64_t(t.all_rows()) * t.tiles() : 0);
    short_codes = w.take<uint8_t>(int64_t(t.all_rows()) * t.short_length);
    bytes = w.used;
  }
};

}  // namespace
}  // namespace tah

int64_t tah_quant_encode_workspace(const TahTiling& t) { return tah::EncodeBuffers(t, nullptr).bytes; }

void tah_quant_encode(const void* x, DType dtype, const TahTiling& tiling, TahPayload payload, uint8_t* workspace,
                      cudaStream_t stream) {
  const tah::Tiling t(tiling);
  const tah::EncodeBuffers w(t, workspace);
  const auto* bytes = static_cast<const uint8_t*>(x);
  tah::rank_windows(x, dtype, t, w.keys, w.histogram, w.sums, stream);
  tah::select_windows(t, w.keys, w.histogram, w.candidates, w.segments, w.ties, w.words, payload.high_map, stream);
  const tah::Out out{payload, t.short_length ? w.pivots : nullptr, w.short_codes};
  if (t.all_whole_tiles()) {
    tah::with_group(t.group, [&](auto group) {
      constexpr int G = group();
      const unsigned blocks = tah::blocks_of(int64_t(t.all_whole_tiles()) * tah::Geometry<G>::kLanes, tah::kThreads);
      const auto kernel = item_bytes(dtype) == 4 ? tah::quantize_tiles<G, 4> : tah::quantize_tiles<G, 2>;
      kernel<<<blocks, tah::kThreads, 0, stream>>>(bytes, dtype, t, w.words, out, tah::rows_aligned(x, dtype, t));
    });
  }
  if (!t.short_length) return;
  tah::quantize_short<<<t.all_rows(), tah::kThreads, 0, stream>>>(bytes, dtype, t, out);
  tah::pack_bytes(w.short_codes, int64_t(t.all_rows()) * t.short_length, t.high_bits, payload.short_codes, stream);
  tah::pack_bytes(w.pivots, int64_t(t.all_rows()) * t.tiles(), t.pivot_bits(), payload.pivots, stream);
}

}  // namespace megatron_compress
