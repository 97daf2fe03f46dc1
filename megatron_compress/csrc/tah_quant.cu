// Quantization kernels of compressors/tah_quant.py, and the order of launches.
#include "block.cuh"
#include "tah_quant.cuh"

namespace megatron_compress {
namespace tah {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
constexpr float kMinStep = 0x1p-126f;
constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, which the low bits hold

__device__ __forceinline__ float bfloat16_saturated(float x) {
  return from_bfloat16_bits(bfloat16_bits(saturate(x, kBFloat16Max)));
}

// A tile's scale, zero and quantizer, from the extremes of its (transformed) values.
struct Range {
  float scale, zero, reference, inverse;
};

__device__ __forceinline__ Range range_of(float low, float high, bool rotated, float levels) {
  low += 0.0f;  // -0 is 0: which of them is met depends on the order
  high += 0.0f;
  Range r;
  r.zero = bfloat16_saturated(low * (1.0f / kHeadroom));
  r.reference = rotated ? low : r.zero * kHeadroom;
  r.scale = bfloat16_saturated(__fdiv_rn(fmaxf(high - r.reference, 0.0f), levels) * (1.0f / kHeadroom));
  const float step = r.scale * kHeadroom;
  r.inverse = step < kMinStep ? 0.0f : __frcp_rn(step);
  return r;
}

__device__ __forceinline__ uint32_t code_of(float y, const Range& r, float levels) {
  const float q = fminf(fmaxf((y - r.reference) * r.inverse, 0.0f), levels);
  return __float_as_uint(q + kRounder) & 0xff;
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

template <int G, int kItem>
__global__ void __launch_bounds__(kThreads) quantize_tiles(const uint8_t* x, DType dtype, TahTiling t,
                                                           const Word* words, Out out, bool aligned) {
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
  Rows::load(stage, [&](int row) { return x + __shfl_sync(kAllLanes, offset, row) * kItem; }, rows, lane, aligned);
  const Place place = place_of(tile, t, words);
  float v[N];
  read_row<kItem>(stage + lane * Rows::kStride, dtype, v);
  float largest = 0.0f, second = 0.0f;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    v[i] *= kHeadroom;
    second = fmaxf(second, fminf(largest, fabsf(v[i])));
    largest = max_nan(largest, fabsf(v[i]));
  }
#pragma unroll
  for (int distance = 1; distance < kLanes; distance *= 2) {
    const float other = __shfl_xor_sync(kAllLanes, largest, distance);
    second = fmaxf(fmaxf(second, __shfl_xor_sync(kAllLanes, second, distance)), fminf(largest, other));
    largest = max_nan(largest, other);
  }
  const bool finite = is_finite(largest);
  const bool rotated = finite && largest > t.threshold * second && t.threshold <= kFloatMax;
  uint32_t pivot = 0;
  const unsigned mates = (kLanes == 32 ? kAllLanes : (1u << kLanes) - 1) << (lane / kLanes * kLanes);
  if (rotated) {
    uint32_t at = G;
    float peak = 0.0f;
#pragma unroll
    for (int i = N - 1; i >= 0; --i) {
      if (fabsf(v[i]) == largest) at = piece * N + i, peak = v[i];
    }
    pivot = at;
#pragma unroll
    for (int distance = 1; distance < kLanes; distance *= 2)
      pivot = min(pivot, __shfl_xor_sync(mates, pivot, distance));
    float head = v[0];
    if (kLanes > 1) {
      head = __shfl_sync(mates, head, lane / kLanes * kLanes);
      peak = __shfl_sync(mates, peak, lane / kLanes * kLanes + pivot / N);
    }
#pragma unroll
    for (int i = 0; i < N; ++i)
      if (piece * N + i == pivot) v[i] = head;
    if (piece == 0) v[0] = peak;
    hadamard_in_thread<N>(v);
    hadamard_across_lanes<N, kLanes>(v, lane, mates);
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] *= 1.0f / G;
  }
  float low = v[0], high = v[0];
#pragma unroll
  for (int i = 1; i < N; ++i) {
    low = fminf(low, v[i]);
    high = fmaxf(high, v[i]);
  }
  low = min_across_lanes<kLanes>(low);
  high = max_across_lanes<kLanes>(high);
  if (!finite) low = high = 0.0f;
  const int bits = place.high ? t.high_bits : t.low_bits;
  const float levels = float((1 << bits) - 1);
  const Range r = range_of(low, high, rotated, levels);
  if (lane < rows) {
    uint32_t codes[N];
#pragma unroll
    for (int i = 0; i < N; ++i) codes[i] = finite ? code_of(v[i], r, levels) : 0u;
    uint8_t* target = (place.high ? out.payload.high_codes : out.payload.low_codes) +
                      (int64_t(place.rank) * kLanes + piece) * (N / 8 * bits);
    with_bits(bits, [&](auto constant) { pack_row<decltype(constant)::value>(codes, target); });
    if (piece == 0) store_tile(out, tile.slot(t), r, finite, rotated);
  }
  if (out.pivots) {
    if (lane < rows && piece == 0) out.pivots[tile.slot(t)] = uint8_t(pivot);
    return;
  }
  // No short tiles: slots follow each other, and a warp's first one is a multiple of eight.
  const int count = rows / kLanes;
  const uint32_t of_tile = __shfl_sync(kAllLanes, pivot, lane * kLanes % 32);
  store_pivots(out.payload.pivots, uint32_t(first / kLanes) + lane, of_tile, t.pivot_bits(), lane < count);
}

// A row's last tile of t.short_length elements, by a block; rotated only if that is a power of two.
__global__ void __launch_bounds__(kThreads) quantize_short(const uint8_t* x, DType dtype, TahTiling t, Out out) {
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
  const float levels = float((1 << t.high_bits) - 1);
  const Range r = range_of(low, high, rotated, levels);
  for (uint32_t i = threadIdx.x; i < length; i += kThreads)
    out.short_codes[int64_t(row) * length + i] = finite ? uint8_t(code_of(v[i], r, levels)) : 0;
  if (threadIdx.x == 0) {
    const uint32_t slot = row * t.tiles() + t.whole_tiles();
    store_tile(out, slot, r, finite, rotated);
    out.pivots[slot] = rotated ? uint8_t(pivot) : 0;
  }
}

struct Header {
  float step, zero;
  bool rotated;
};

__device__ __forceinline__ Header header_of(const uint8_t* scales, const uint8_t* zeros, uint32_t slot) {
  const uint16_t scale = reinterpret_cast<const uint16_t*>(scales)[slot];
  const float zero = from_bfloat16_bits(reinterpret_cast<const uint16_t*>(zeros)[slot]);
  return {from_bfloat16_bits(scale & 0x7fff) * kHeadroom, zero * kHeadroom, bool(scale >> 15)};
}

__device__ __forceinline__ uint32_t pivot_at(const uint8_t* stream, uint32_t slot, int bits) {
  const uint64_t bit = uint64_t(slot) * bits;
  uint32_t two = stream[bit / 8];
  if (bit % 8 + bits > 8) two |= uint32_t(stream[bit / 8 + 1]) << 8;
  return two >> bit % 8 & ((1u << bits) - 1);
}

template <int G, int kItem, bool kSum>
__global__ void __launch_bounds__(kThreads) decode_tiles(TahPayload p, int64_t stride, int ranks, uint8_t* out,
                                                         DType dtype, TahTiling t, const Word* words, bool aligned) {
  constexpr int N = Geometry<G>::kRow, kLanes = Geometry<G>::kLanes;
  using Rows = WarpRows<N * kItem>;
  __shared__ alignas(16) uint8_t shared[kWarps * Rows::kSharedBytes];
  const int lane = threadIdx.x % 32;
  const int64_t first = int64_t(blockIdx.x) * kThreads + (threadIdx.x - lane);
  const int64_t parts = int64_t(t.all_whole_tiles()) * kLanes;
  const int rows = int(min(int64_t(32), parts - first));
  if (rows <= 0) return;
  const uint32_t part = uint32_t(min(first + lane, parts - 1)), piece = part % kLanes;
  const Tile tile(part / kLanes, t);
  const unsigned mates = (kLanes == 32 ? kAllLanes : (1u << kLanes) - 1) << (lane / kLanes * kLanes);
  const float limit = ranks == 1 ? largest_finite(dtype) : kFloatMax;
  float total[N];
  for (int rank = 0; rank < (kSum ? ranks : 1); ++rank) {
    const Place place = place_of(tile, t, words + int64_t(rank) * t.samples * t.words());
    const int bits = place.high ? t.high_bits : t.low_bits;
    const uint8_t* source = (place.high ? p.high_codes : p.low_codes) + rank * stride +
                            (int64_t(place.rank) * kLanes + piece) * (N / 8 * bits);
    float v[N];
    with_bits(bits, [&](auto constant) { unpack_row<decltype(constant)::value>(source, v); });
    const Header h = header_of(p.scales + rank * stride, p.zeros + rank * stride, tile.slot(t));
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] = v[i] * h.step + h.zero;
    if (h.rotated) {
      hadamard_in_thread<N>(v);
      hadamard_across_lanes<N, kLanes>(v, lane, mates);
      const uint32_t pivot = pivot_at(p.pivots + rank * stride, tile.slot(t), t.pivot_bits());
      float head = v[0], peak = 0.0f;
#pragma unroll
      for (int i = 0; i < N; ++i)
        if (piece * N + i == pivot) peak = v[i];
      if (kLanes > 1) {
        head = __shfl_sync(mates, head, lane / kLanes * kLanes);
        peak = __shfl_sync(mates, peak, lane / kLanes * kLanes + pivot / N);
      }
#pragma unroll
      for (int i = 0; i < N; ++i)
        if (piece * N + i == pivot) v[i] = head;
      if (piece == 0) v[0] = peak;
    }
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float value = saturate(v[i] * (1.0f / kHeadroom), limit);
      total[i] = kSum && rank ? total[i] + value : value;
    }
  }
  const int64_t offset = row_offset(tile.row, t) + int64_t(tile.column) * G + piece * N;
  uint8_t* stage = shared + threadIdx.x / 32 * Rows::kSharedBytes;
  write_row<kItem>(stage + lane * Rows::kStride, dtype, total);
  Rows::store(stage, [&](int row) { return out + __shfl_sync(kAllLanes, offset, row) * kItem; }, rows, lane, aligned);
}

__global__ void __launch_bounds__(kThreads) decode_short(TahPayload p, int64_t stride, int ranks, uint8_t* out,
                                                         DType dtype, TahTiling t) {
  __shared__ float v[kMaxTail], total[kMaxTail];
  const uint32_t row = blockIdx.x, length = t.short_length, slot = row * t.tiles() + t.whole_tiles();
  const float limit = ranks == 1 ? largest_finite(dtype) : kFloatMax;
  for (int rank = 0; rank < ranks; ++rank) {
    const Header h = header_of(p.scales + rank * stride, p.zeros + rank * stride, slot);
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < length; i += kThreads) {
      const uint32_t code = [&] {
        const uint64_t bit = (uint64_t(row) * length + i) * t.high_bits;
        const uint8_t* at = p.short_codes + rank * stride + bit / 8;
        const uint32_t two = at[0] | (bit % 8 + t.high_bits > 8 ? uint32_t(at[1]) << 8 : 0u);
        return two >> bit % 8 & ((1u << t.high_bits) - 1);
      }();
      v[i] = float(code) * h.step + h.zero;
    }
    if (h.rotated) {
      hadamard_in_block(v, length, length);
      if (threadIdx.x == 0) {
        const uint32_t pivot = pivot_at(p.pivots + rank * stride, slot, t.pivot_bits());
        const float head = v[0];
        v[0] = v[pivot];
        v[pivot] = head;
      }
    }
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < length; i += kThreads) {
      const float value = saturate(v[i] * (1.0f / kHeadroom), limit);
      total[i] = rank ? total[i] + value : value;
    }
  }
  const int64_t offset = row_offset(row, t) + int64_t(t.whole_tiles()) * t.group;
  for (uint32_t i = threadIdx.x; i < length; i += kThreads) write_item(out, dtype, offset + i, total[i]);
}

unsigned blocks_of(int64_t items) { return unsigned((items + kThreads - 1) / kThreads); }

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
  uint2* candidates;
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
    candidates = w.take<uint2>(words_all);
    ties = w.take<uint32_t>(t.samples);
    words = w.take<Word>(words_all);
    pivots = w.take<uint8_t>(t.short_length ? int64_t(t.all_rows()) * t.tiles() : 0);
    short_codes = w.take<uint8_t>(int64_t(t.all_rows()) * t.short_length);
    bytes = w.used;
  }
};

bool rows_aligned(const void* x, DType dtype, const TahTiling& t) {
  return is_aligned_16(x) && t.channels * item_bytes(dtype) % 16 == 0;
}

}  // namespace
}  // namespace tah

int64_t tah_quant_encode_workspace(const TahTiling& t) { return tah::EncodeBuffers(t, nullptr).bytes; }

int64_t tah_quant_decode_workspace(const TahTiling& t, int ranks) {
  return int64_t(ranks) * t.samples * t.words() * sizeof(tah::Word);
}

void tah_quant_encode(const void* x, DType dtype, const TahTiling& t, TahPayload payload, uint8_t* workspace,
                      cudaStream_t stream) {
  const tah::EncodeBuffers w(t, workspace);
  const auto* bytes = static_cast<const uint8_t*>(x);
  tah::rank_windows(x, dtype, t, w.keys, w.histogram, w.sums, stream);
  tah::select_windows(t, w.keys, w.histogram, w.candidates, w.ties, w.words, payload.high_map, stream);
  const tah::Out out{payload, t.short_length ? w.pivots : nullptr, w.short_codes};
  if (t.all_whole_tiles()) {
    tah::with_group(t.group, [&](auto group) {
      constexpr int G = group();
      const unsigned blocks = tah::blocks_of(int64_t(t.all_whole_tiles()) * tah::Geometry<G>::kLanes);
      const auto kernel = item_bytes(dtype) == 4 ? tah::quantize_tiles<G, 4> : tah::quantize_tiles<G, 2>;
      kernel<<<blocks, tah::kThreads, 0, stream>>>(bytes, dtype, t, w.words, out, tah::rows_aligned(x, dtype, t));
    });
  }
  if (!t.short_length) return;
  tah::quantize_short<<<t.all_rows(), tah::kThreads, 0, stream>>>(bytes, dtype, t, out);
  tah::pack_bytes(w.short_codes, int64_t(t.all_rows()) * t.short_length, t.high_bits, payload.short_codes, stream);
  tah::pack_bytes(w.pivots, int64_t(t.all_rows()) * t.tiles(), t.pivot_bits(), payload.pivots, stream);
}

void tah_quant_decode(TahPayload payload, int64_t stride, int ranks, void* out, DType dtype, const TahTiling& t,
                      uint8_t* workspace, cudaStream_t stream) {
  auto* words = reinterpret_cast<tah::Word*>(workspace);
  auto* bytes = static_cast<uint8_t*>(out);
  tah::read_windows(t, payload.high_map, stride, ranks, words, stream);
  if (t.all_whole_tiles()) {
    tah::with_group(t.group, [&](auto group) {
      constexpr int G = group();
      const unsigned blocks = tah::blocks_of(int64_t(t.all_whole_tiles()) * tah::Geometry<G>::kLanes);
      const bool wide = item_bytes(dtype) == 4;
      const auto kernel = ranks > 1 ? (wide ? tah::decode_tiles<G, 4, true> : tah::decode_tiles<G, 2, true>)
                                    : (wide ? tah::decode_tiles<G, 4, false> : tah::decode_tiles<G, 2, false>);
      kernel<<<blocks, tah::kThreads, 0, stream>>>(payload, stride, ranks, bytes, dtype, t, words,
                                                   tah::rows_aligned(out, dtype, t));
    });
  }
  if (t.short_length)
    tah::decode_short<<<t.all_rows(), tah::kThreads, 0, stream>>>(payload, stride, ranks, bytes, dtype, t);
}

}  // namespace megatron_compress
