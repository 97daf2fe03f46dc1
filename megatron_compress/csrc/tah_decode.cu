// Decode of compressors/tah_quant.py: one payload or the sum of several.
#include "block.cuh"
#include "scaled_codes.cuh"
#include "tah_quant.cuh"

namespace megatron_compress {
namespace tah {
namespace {

constexpr int kThreads = 256;
constexpr float kHuge = 0x1p90f;

// A tile's parameters; those of huge values are taken times a power of two until the end, so that none overflows.
struct Header {
  float scale, zero, grow;
  bool rotated;
};

__device__ __forceinline__ Header header_of(const uint8_t* scales, const uint8_t* zeros, uint32_t slot) {
  const uint16_t bits = reinterpret_cast<const uint16_t*>(scales)[slot];
  const float scale = from_bfloat16_bits(bits & 0x7fff);
  const float zero = from_bfloat16_bits(reinterpret_cast<const uint16_t*>(zeros)[slot]);
  const float shrink = scale > kHuge || fabsf(zero) > kHuge ? kHeadroom : 1.0f;
  return {scale * shrink, zero * shrink, 1.0f / shrink, bool(bits >> 15)};
}

// A chunk times the header's power of two, saturated where it might leave the range.
__device__ __forceinline__ void grow(float (&v)[8], const Header& h, float limit) {
  if (h.grow == 1.0f && limit > kFloat16Max) return;
#pragma unroll
  for (int i = 0; i < 8; ++i) v[i] = saturate(v[i] * h.grow, limit);
}

__device__ __forceinline__ uint32_t pivot_at(const uint8_t* stream, uint32_t slot, int bits) {
  const uint64_t bit = uint64_t(slot) * bits;
  uint32_t two = stream[bit / 8];
  if (bit % 8 + bits > 8) two |= uint32_t(stream[bit / 8 + 1]) << 8;
  return two >> bit % 8 & ((1u << bits) - 1);
}

// The codes of a chunk, `bits` each.
__device__ __forceinline__ void decode_chunk(uint64_t codes, int bits, const Header& h, float (&v)[8]) {
  const uint32_t mask = (1u << bits) - 1;
  uint32_t half[2] = {uint32_t(codes), uint32_t(codes >> (4 * bits))};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    v[i] = (__uint_as_float(0x4b000000u | (half[i / 4] & mask)) - 8388608.0f) * h.scale + h.zero;
    half[i / 4] >>= bits;
  }
}

// Transform a tile of kLanes chunks in neighbouring threads, chunk `piece` here, and swap element 0 with the pivot.
// Every lane of the warp calls it.
template <int kLanes>
__device__ __forceinline__ void rotate_back(float (&v)[8], uint32_t pivot, uint32_t piece, int lane) {
  hadamard_in_thread<8>(v);
  hadamard_across_lanes<8, kLanes>(v, lane);
  swap_first<8, kLanes>(v, pivot, piece, lane, kAllLanes);
}

// What a lane knows of one tile, for the lanes that decode it.
struct Source {
  Header header;
  uint32_t pivot, rank_and_high;

  __device__ __forceinline__ Source(const TahPayload& p, int64_t shift, const Tile& tile, const Tiling& t,
                                    const Word* words) {
    header = header_of(p.scales + shift, p.zeros + shift, tile.slot(t));
    const Place place = place_of(tile, t, words);
    rank_and_high = place.rank | uint32_t(place.high) << 31;
    pivot = header.rotated ? pivot_at(p.pivots + shift, tile.slot(t), t.pivot_bits()) : 0;
  }

  // Every lane of the warp calls it. any_grows: whether one of them has values to grow.
  __device__ __forceinline__ Header header_at(int lane, bool any_grows) const {
    const uint32_t sign = header.rotated ? 0x80000000u : 0u;
    const uint32_t scale = __shfl_sync(kAllLanes, __float_as_uint(header.scale) | sign, lane);
    const float zero = __shfl_sync(kAllLanes, header.zero, lane);
    const float grow = any_grows ? __shfl_sync(kAllLanes, header.grow, lane) : 1.0f;
    return {__uint_as_float(scale & 0x7fffffffu), zero, grow, bool(scale >> 31)};
  }
};

// A warp decodes 32 tiles. First each lane looks after one; then kLanes neighbouring lanes decode a tile together, eight
// elements each, and the warp takes 32 / kLanes tiles a step. kBytes: what the codes of eight take at most, 4 or 8.
template <int G, int kBytes, bool kSum>
__global__ void __launch_bounds__(kThreads, kSum ? 2 : 4)
    decode_tiles(TahPayload p, int64_t stride, int ranks, uint8_t* out, DType dtype, Tiling t, const Word* words,
                 bool aligned) {
  constexpr int kLanes = G / 8, kBatch = kLanes < 4 ? kLanes : 4;  // steps whose loads are side by side
  const int lane = threadIdx.x % 32;
  const uint32_t piece = lane % kLanes;
  const uint32_t first = blockIdx.x * kThreads + (threadIdx.x - lane), tiles = t.all_whole_tiles();
  if (first >= tiles) return;
  const Tile tile(min(first + lane, tiles - 1), t);
  const int64_t offset = row_offset(tile.row, t) + int64_t(tile.column) * G;
  const float limit = kSum ? kFloatMax : largest_finite(dtype);
  Source source(p, 0, tile, t, words);
#pragma unroll 1
  for (int batch = 0; batch < kLanes; batch += kBatch) {
    const auto mate = [&](int u) { return (batch + u) * (32 / kLanes) + lane / kLanes; };  // whose tile it is
    float total[kSum ? kBatch : 1][8];
#pragma unroll 1
    for (int rank = 0; rank < (kSum ? ranks : 1); ++rank) {
      const int64_t shift = rank * stride;
      if (kSum) source = Source(p, shift, tile, t, words + int64_t(rank) * t.samples * t.words());
      const bool any_grows = __any_sync(kAllLanes, source.header.grow != 1.0f);
      uint64_t codes[kBatch];
      int bits[kBatch];
#pragma unroll
      for (int u = 0; u < kBatch; ++u) {
        const uint32_t place = __shfl_sync(kAllLanes, source.rank_and_high, mate(u));
        bits[u] = place >> 31 ? t.high_bits : t.low_bits;
        const int64_t chunk = int64_t(place & 0x7fffffffu) * kLanes + piece;
        codes[u] = load_bytes<kBytes, 1>((place >> 31 ? p.high_codes : p.low_codes) + shift + chunk * bits[u], bits[u]);
      }
#pragma unroll
      for (int u = 0; u < kBatch; ++u) {
        const Header h = source.header_at(mate(u), any_grows);
        float v[8];
        decode_chunk(codes[u], bits[u], h, v);
        if (__any_sync(kAllLanes, h.rotated)) {
          float rotated[8];
#pragma unroll
          for (int i = 0; i < 8; ++i) rotated[i] = v[i];
          rotate_back<kLanes>(rotated, __shfl_sync(kAllLanes, source.pivot, mate(u)), piece, lane);
#pragma unroll
          for (int i = 0; i < 8; ++i) v[i] = h.rotated ? rotated[i] : v[i];
        }
        grow(v, h, limit);
        if constexpr (kSum) {
#pragma unroll
          for (int i = 0; i < 8; ++i) v[i] = total[u][i] = rank ? total[u][i] + v[i] : v[i];
        }
        const int64_t at = __shfl_sync(kAllLanes, offset, mate(u)) + piece * 8;
        const bool last = !kSum || rank + 1 == ranks;
        if (last && first + mate(u) < tiles) store_eight(out, dtype, at, aligned, v);
      }
    }
  }
}

__global__ void __launch_bounds__(kThreads) decode_short(TahPayload p, int64_t stride, int ranks, uint8_t* out,
                                                         DType dtype, Tiling t) {
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
      v[i] = float(code) * h.scale + h.zero;
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
      const float value = saturate(v[i] * h.grow, limit);
      total[i] = rank ? total[i] + value : value;
    }
  }
  const int64_t offset = row_offset(row, t) + int64_t(t.whole_tiles()) * t.group;
  for (uint32_t i = threadIdx.x; i < length; i += kThreads) write_item(out, dtype, offset + i, total[i]);
}

}  // namespace
}  // namespace tah

int64_t tah_quant_decode_workspace(const TahTiling& t, int ranks) {
  return int64_t(ranks) * t.samples * t.words() * sizeof(tah::Word);
}

void tah_quant_decode(TahPayload payload, int64_t stride, int ranks, void* out, DType dtype, const TahTiling& tiling,
                      uint8_t* workspace, cudaStream_t stream) {
  const tah::Tiling t(tiling);
  auto* words = reinterpret_cast<tah::Word*>(workspace);
  auto* bytes = static_cast<uint8_t*>(out);
  tah::read_windows(t, payload.high_map, stride, ranks, words, stream);
  if (t.all_whole_tiles()) {
    tah::with_group(t.group, [&](auto group) {
      constexpr int G = group();
      const bool wide = t.high_bits > 4 || t.low_bits > 4;
      const auto kernel = ranks > 1 ? (wide ? tah::decode_tiles<G, 8, true> : tah::decode_tiles<G, 4, true>)
                                    : (wide ? tah::decode_tiles<G, 8, false> : tah::decode_tiles<G, 4, false>);
      kernel<<<tah::blocks_of(t.all_whole_tiles(), tah::kThreads), tah::kThreads, 0, stream>>>(
          payload, stride, ranks, bytes, dtype, t, words, tah::rows_aligned(out, dtype, t));
    });
  }
  if (t.short_length)
    tah::decode_short<<<t.all_rows(), tah::kThreads, 0, stream>>>(payload, stride, ranks, bytes, dtype, t);
}

}  // namespace megatron_compress
