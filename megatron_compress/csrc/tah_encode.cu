// Encode of compressors/tah_quant.py: quantize tiles whose bits are known, and the order of all launches.
#include "block.cuh"
#include "tah_quant.cuh"

namespace megatron_compress {
namespace tah {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
constexpr float kMinSpan = 0x1p-126f;
constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, which the low bits hold
constexpr uint32_t kRounderBits = 0x4b400000u;

__device__ __forceinline__ float bfloat16_saturated(float x) {
  return from_bfloat16_bits(bfloat16_bits(saturate(x, kBFloat16Max)));
}

// A tile's scale, zero and quantizer, from the extremes of its (transformed) values: code = levels * q, where
// q = (y - reference) * inverse within [0, 1].
struct Range {
  float scale, zero, reference, inverse, levels;
};

__device__ __forceinline__ Range range_of(float low, float high, bool rotated, int bits) {
  low += 0.0f;  // -0 is 0: which of them is met depends on the order
  high += 0.0f;
  Range r;
  r.levels = float((1 << bits) - 1);
  r.zero = bfloat16_saturated(low * (1.0f / kHeadroom));
  r.reference = rotated ? low : r.zero * kHeadroom;
  r.scale = bfloat16_saturated(__fdiv_rn(fmaxf(high - r.reference, 0.0f), r.levels) * (1.0f / kHeadroom));
  const float span = (r.scale * kHeadroom) * r.levels;
  r.inverse = span < kMinSpan ? 0.0f : __frcp_rn(span);
  return r;
}

// From y - reference; the code stands in the low bits, behind those of kRounder.
__device__ __forceinline__ uint32_t rounded(float distance, float inverse, float levels) {
  return __float_as_uint(__saturatef(distance * inverse) * levels + kRounder);
}

// How codes of some bits are joined four at a time; `offset` takes off what kRounder added.
struct Joint {
  int bits;
  uint32_t weight, offset;
  float levels;

  __device__ __forceinline__ explicit Joint(int b) {
    bits = b, weight = 1u << b, levels = float(weight - 1);
    offset = kRounderBits * (1 + weight * (1 + weight * (1 + weight)));
  }

  __device__ __forceinline__ uint32_t four(const float* distance, float inverse) const {
    uint32_t joined = rounded(distance[3], inverse, levels);
#pragma unroll
    for (int i = 2; i >= 0; --i) joined = joined * weight + rounded(distance[i], inverse, levels);
    return joined - offset;
  }

  __device__ __forceinline__ uint64_t eight(const float (&distance)[8], float inverse) const {
    return four(distance, inverse) | uint64_t(four(distance + 4, inverse)) << (4 * bits);
  }
};

// The extremes of a row's values, and of its magnitudes the largest and the second; NaN where one is not finite.
struct Extremes {
  float low, high, largest, second;
};

template <int N>
__device__ __forceinline__ Extremes extremes_of(const float (&v)[N]) {
  Extremes e{v[0], v[0], 0.0f, 0.0f};
#pragma unroll
  for (int i = 0; i < N; ++i) {
    e.low = fminf(e.low, v[i]);
    e.high = fmaxf(e.high, v[i]);
    e.second = fmaxf(e.second, fminf(e.largest, fabsf(v[i])));
    e.largest = max_nan(e.largest, fabsf(v[i]));
  }
  return e;
}

// The same of 16-bit floats as they are, two at a time, times kHeadroom.
template <class Pair, DType kDType, int N>
__device__ __forceinline__ Extremes extremes_of_pairs(const uint32_t (&words)[N]) {
  const auto pair = [](uint32_t bits) { return *reinterpret_cast<const Pair*>(&bits); };
  Pair low = pair(words[0]), high = low, largest = pair(0u), second = largest;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const Pair magnitude = pair(words[i] & 0x7fff7fffu);
    low = __hmin2(low, pair(words[i]));
    high = __hmax2(high, pair(words[i]));
    second = __hmax2(second, __hmin2(largest, magnitude));
    largest = __hmax2_nan(largest, magnitude);
  }
  const auto floats = [](Pair two) { return unpack_pair(*reinterpret_cast<const uint32_t*>(&two), kDType); };
  const float2 lows = floats(low), highs = floats(high), firsts = floats(largest), seconds = floats(second);
  return {fminf(lows.x, lows.y) * kHeadroom, fmaxf(highs.x, highs.y) * kHeadroom,
          max_nan(firsts.x, firsts.y) * kHeadroom,
          fmaxf(fminf(firsts.x, firsts.y), fmaxf(seconds.x, seconds.y)) * kHeadroom};
}

template <int kLanes>
__device__ __forceinline__ Extremes across_lanes(Extremes e) {
#pragma unroll
  for (int distance = 1; distance < kLanes; distance *= 2) {
    const float other = __shfl_xor_sync(kAllLanes, e.largest, distance);
    e.second = fmaxf(fmaxf(e.second, __shfl_xor_sync(kAllLanes, e.second, distance)), fminf(e.largest, other));
    e.largest = max_nan(e.largest, other);
    e.low = fminf(e.low, __shfl_xor_sync(kAllLanes, e.low, distance));
    e.high = fmaxf(e.high, __shfl_xor_sync(kAllLanes, e.high, distance));
  }
  return e;
}

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

// Swap the pivot with element 0 and transform a tile of kLanes chunks in neighbouring threads; returns the pivot. Every
// lane of the warp calls it.
template <int kLanes>
__device__ __forceinline__ uint32_t rotate(float (&v)[8], float largest, int piece, int lane) {
  uint32_t pivot = 8 * kLanes;
  float peak = 0.0f;
#pragma unroll
  for (int i = 7; i >= 0; --i) {
    if (fabsf(v[i]) == largest) pivot = piece * 8 + i, peak = v[i];
  }
#pragma unroll
  for (int distance = 1; distance < kLanes; distance *= 2)
    pivot = min(pivot, __shfl_xor_sync(kAllLanes, pivot, distance));
  const float head = __shfl_sync(kAllLanes, v[0], lane / kLanes * kLanes);
  peak = __shfl_sync(kAllLanes, peak, lane / kLanes * kLanes + pivot / 8);
#pragma unroll
  for (int i = 0; i < 8; ++i)
    if (piece * 8 + i == pivot) v[i] = head;
  if (piece == 0) v[0] = peak;
  hadamard_in_thread<8>(v);
  hadamard_across_lanes<8, kLanes>(v, lane);
#pragma unroll
  for (int i = 0; i < 8; ++i) v[i] *= 1.0f / (8 * kLanes);
  return pivot;
}

// Of a tile of kLanes chunks.
template <int kLanes>
__device__ __forceinline__ Range range_of_rotated(const float (&v)[8], int bits) {
  float low = v[0], high = v[0];
#pragma unroll
  for (int i = 1; i < 8; ++i) {
    low = fminf(low, v[i]);
    high = fmaxf(high, v[i]);
  }
#pragma unroll
  for (int distance = 1; distance < kLanes; distance *= 2) {
    low = fminf(low, __shfl_xor_sync(kAllLanes, low, distance));
    high = fmaxf(high, __shfl_xor_sync(kAllLanes, high, distance));
  }
  return range_of(low, high, true, bits);
}

// A tile's codes, a chunk a lane, to its place in the stream: by words where tiles are whole words and chunks are no more
// than one. Every lane of the warp calls it.
template <int G, bool kWide>
__device__ __forceinline__ void store_codes(uint8_t* tile, uint64_t codes, int bits, int piece, int lane, bool valid) {
  constexpr int kLanes = G / 8;
  if constexpr (G >= 32 && !kWide) {
    const int chunk = bits == 4 ? piece : bits == 3 ? piece * 43 >> 5 : piece * 2;  // 4 * piece / bits: word's first
    const int skipped = 32 * piece - 8 * bits * chunk, base = lane / kLanes * kLanes;
    const uint32_t first = __shfl_sync(kAllLanes, uint32_t(codes), base + chunk);
    const uint32_t next = __shfl_sync(kAllLanes, uint32_t(codes), base + chunk + 1);
    if (valid && piece * 32 < G * bits)
      reinterpret_cast<uint32_t*>(tile)[piece] = first >> skipped | (bits == 4 ? 0u : next << (8 * bits - skipped));
  } else if (valid) {
    for (int i = 0; i < bits; ++i) tile[piece * bits + i] = uint8_t(codes >> (8 * i));
  }
}

// The product is exact for 16-bit floats, so it may be fused.
template <int kItem>
__device__ __forceinline__ float less_reference(float x, float reference) {
  return kItem == 2 ? __fmaf_rn(x, kHeadroom, -reference) : x * kHeadroom - reference;
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

// A warp takes 32 rows of N values. Each lane finds the range of its row (a tile, or with its mates one of several rows
// of a tile); then the rows are quantized by all lanes, a chunk of eight at a time. kWide: codes of more than 4 bits.
template <int G, int kItem, bool kWide>
__global__ void __launch_bounds__(kThreads, kItem == 2 ? 8 : 4)
    quantize_tiles(const uint8_t* x, DType dtype, Tiling t, const Word* words, Out out, bool aligned) {
  constexpr int N = Geometry<G>::kRow, kMates = Geometry<G>::kLanes;
  constexpr int kLanes = G / 8, kChunks = N / 8;  // chunks of a tile, of a row
  using Rows = WarpRows<N * kItem>;
  __shared__ alignas(16) uint8_t shared[kWarps * Rows::kSharedBytes];
  const int lane = threadIdx.x % 32, piece = lane % kLanes;
  // Backwards: what the cache still holds of the first pass is the end.
  const int64_t first = int64_t(gridDim.x - 1 - blockIdx.x) * kThreads + (threadIdx.x - lane);
  const int64_t parts = int64_t(t.all_whole_tiles()) * kMates;
  const int rows = int(min(int64_t(32), parts - first));
  if (rows <= 0) return;
  const uint32_t part = uint32_t(min(first + lane, parts - 1));
  const Tile tile(part / kMates, t);
  const int64_t offset = row_offset(tile.row, t) + int64_t(tile.column) * G + part % kMates * N;
  uint8_t* stage = shared + threadIdx.x / 32 * Rows::kSharedBytes;
  start_rows<N, kItem>(stage, x, offset, rows, lane, aligned);
  const Place place = place_of(tile, t, words);
  const Joint high(t.high_bits), low(t.low_bits);
  Rows::finish();
  const Extremes e = across_lanes<kMates>(read_extremes<kItem, N>(stage + lane * Rows::kStride, dtype));
  const bool finite = is_finite(e.largest);
  const bool rotated = finite && e.largest > t.threshold * e.second && t.threshold <= kFloatMax;
  Range r = {};
  if (finite && !rotated) r = range_of(e.low, e.high, false, place.high ? t.high_bits : t.low_bits);
  const uint32_t rank_and_high = place.rank | uint32_t(place.high) << 31;
  const bool any_rotated = __any_sync(kAllLanes, rotated);
  uint32_t pivot = 0;
#pragma unroll(kChunks < 2 ? kChunks : 2)
  for (int step = 0; step < kChunks; ++step) {
    const int row = (step * 32 + lane) / kChunks;  // whose chunk it is
    const uint32_t its_place = __shfl_sync(kAllLanes, rank_and_high, row);
    const float reference = __shfl_sync(kAllLanes, r.reference, row);
    float inverse = __shfl_sync(kAllLanes, r.inverse, row);
    const Joint& joint = its_place >> 31 ? high : low;
    float v[8];
    read_row<kItem>(stage + row * Rows::kStride + lane % kChunks * 8 * kItem, dtype, v);
    if (any_rotated) {
      float turned[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) turned[i] = v[i] * kHeadroom;
      const uint32_t at = rotate<kLanes>(turned, __shfl_sync(kAllLanes, e.largest, row), piece, lane);
      const Range range = range_of_rotated<kLanes>(turned, joint.bits);
      const int source = lane * kChunks % 32;  // the first chunk of this lane's row, at some step
      const float scale = __shfl_sync(kAllLanes, range.scale, source), zero = __shfl_sync(kAllLanes, range.zero, source);
      const uint32_t its_pivot = __shfl_sync(kAllLanes, at, source);
      if (rotated && lane * kChunks / 32 == step) r.scale = scale, r.zero = zero, pivot = its_pivot;
      const bool this_one = __shfl_sync(kAllLanes, rotated, row);
      inverse = this_one ? range.inverse : inverse;
#pragma unroll
      for (int i = 0; i < 8; ++i)
        v[i] = this_one ? turned[i] - range.reference : less_reference<kItem>(v[i], reference);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) v[i] = less_reference<kItem>(v[i], reference);
    }
    uint8_t* target = (its_place >> 31 ? out.payload.high_codes : out.payload.low_codes) +
                      int64_t(its_place & 0x7fffffffu) * (G / 8 * joint.bits);
    store_codes<G, kWide>(target, joint.eight(v, inverse), joint.bits, piece, lane, row < rows);
  }
  if (lane < rows && part % kMates == 0) store_tile(out, tile.slot(t), r, finite, rotated);
  if (out.pivots) {
    if (lane < rows && part % kMates == 0) out.pivots[tile.slot(t)] = uint8_t(pivot);
    return;
  }
  // No short tiles: slots follow each other, and a warp's first one is a multiple of eight.
  const uint32_t of_tile = __shfl_sync(kAllLanes, pivot, lane * kMates % 32);
  store_pivots(out.payload.pivots, uint32_t(first / kMates) + lane, of_tile, t.pivot_bits(), lane < rows / kMates);
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
    out.short_codes[int64_t(row) * length + i] = finite ? uint8_t(rounded(v[i] - r.reference, r.inverse, r.levels)) : 0;
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
      const bool wide = t.high_bits > 4 || t.low_bits > 4, four = item_bytes(dtype) == 4;
      const auto kernel = wide ? (four ? tah::quantize_tiles<G, 4, true> : tah::quantize_tiles<G, 2, true>)
                               : (four ? tah::quantize_tiles<G, 4, false> : tah::quantize_tiles<G, 2, false>);
      kernel<<<blocks, tah::kThreads, 0, stream>>>(bytes, dtype, t, w.words, out, tah::rows_aligned(x, dtype, t));
    });
  }
  if (!t.short_length) return;
  tah::quantize_short<<<t.all_rows(), tah::kThreads, 0, stream>>>(bytes, dtype, t, out);
  tah::pack_bytes(w.short_codes, int64_t(t.all_rows()) * t.short_length, t.high_bits, payload.short_codes, stream);
  tah::pack_bytes(w.pivots, int64_t(t.all_rows()) * t.tiles(), t.pivot_bits(), payload.pivots, stream);
}

}  // namespace megatron_compress
