// Decode of compressors/tah_quant.py: one payload or the sum of several.
#include "block.cuh"
#include "tah_quant.cuh"

namespace megatron_compress {
namespace tah {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
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

// Values times the header's power of two, saturated where they might leave the range.
template <int N>
__device__ __forceinline__ void grow_row(float (&v)[N], const Header& h, float limit) {
  if (h.grow == 1.0f && limit > kFloat16Max) return;
#pragma unroll
  for (int i = 0; i < N; ++i) v[i] = saturate(v[i] * h.grow, limit);
}

__device__ __forceinline__ uint32_t pivot_at(const uint8_t* stream, uint32_t slot, int bits) {
  const uint64_t bit = uint64_t(slot) * bits;
  uint32_t two = stream[bit / 8];
  if (bit % 8 + bits > 8) two |= uint32_t(stream[bit / 8 + 1]) << 8;
  return two >> bit % 8 & ((1u << bits) - 1);
}

// Of four codes.
__device__ __forceinline__ void decode_quad(uint32_t quad, int bits, const Header& h, float* v) {
  const uint32_t mask = (1u << bits) - 1;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t code = quad >> (bits * i) & mask;
    v[i] = (__uint_as_float(0x4b000000u | code) - 8388608.0f) * h.scale + h.zero;
  }
}

// Transform a tile of kLanes neighbouring threads and swap element 0 with the pivot.
template <int N, int kLanes>
__device__ __forceinline__ void rotate_back(float (&v)[N], uint32_t pivot, uint32_t piece, int lane) {
  const unsigned mates = ((1u << kLanes) - 1) << (lane / kLanes * kLanes);
  hadamard_in_thread<N>(v);
  hadamard_across_lanes<N, kLanes>(v, lane, mates);
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

template <int G, int kItem, bool kSum>
__global__ void __launch_bounds__(kThreads, kSum || kItem == 4 ? 3 : 5)
    decode_tiles(TahPayload p, int64_t stride, int ranks, uint8_t* out, DType dtype, TahTiling t, const Word* words,
                 bool aligned) {
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
  uint8_t* mine = shared + threadIdx.x / 32 * Rows::kSharedBytes + lane * Rows::kStride;
  float total[kSum ? N : 1];
#pragma unroll 1
  for (int rank = 0; rank < (kSum ? ranks : 1); ++rank) {
    const Header h = header_of(p.scales + rank * stride, p.zeros + rank * stride, tile.slot(t));
    const Place place = place_of(tile, t, words + int64_t(rank) * t.samples * t.words());
    const int bits = place.high ? t.high_bits : t.low_bits;
    const uint8_t* source = (place.high ? p.high_codes : p.low_codes) + rank * stride +
                            (int64_t(place.rank) * kLanes + piece) * (N / 8 * bits);
    uint32_t quads[N / 4];
    with_bits(bits, [&](auto constant) { load_quads<decltype(constant)::value, N>(source, quads); });
    if (!kSum && !h.rotated) {  // few values at a time
#pragma unroll
      for (int c = 0; c < N / 8; ++c) {
        float v[8];
        decode_quad(quads[2 * c], bits, h, v);
        decode_quad(quads[2 * c + 1], bits, h, v + 4);
        grow_row(v, h, largest_finite(dtype));
        write_row<kItem>(mine + c * 8 * kItem, dtype, v);
      }
    } else {
      float v[N];
#pragma unroll
      for (int i = 0; i < N / 4; ++i) decode_quad(quads[i], bits, h, v + 4 * i);
      if (h.rotated)
        rotate_back<N, kLanes>(v, pivot_at(p.pivots + rank * stride, tile.slot(t), t.pivot_bits()), piece, lane);
      grow_row(v, h, kSum ? kFloatMax : largest_finite(dtype));
      if constexpr (kSum) {
#pragma unroll
        for (int i = 0; i < N; ++i) total[i] = rank ? total[i] + v[i] : v[i];
      } else {
        write_row<kItem>(mine, dtype, v);
      }
    }
  }
  if constexpr (kSum) write_row<kItem>(mine, dtype, total);
  const int64_t offset = row_offset(tile.row, t) + int64_t(tile.column) * G + piece * N;
  Rows::store(mine - lane * Rows::kStride, [&](int row) { return out + __shfl_sync(kAllLanes, offset, row) * kItem; },
              rows, lane, aligned);
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

void tah_quant_decode(TahPayload payload, int64_t stride, int ranks, void* out, DType dtype, const TahTiling& t,
                      uint8_t* workspace, cudaStream_t stream) {
  auto* words = reinterpret_cast<tah::Word*>(workspace);
  auto* bytes = static_cast<uint8_t*>(out);
  tah::read_windows(t, payload.high_map, stride, ranks, words, stream);
  if (t.all_whole_tiles()) {
    tah::with_group(t.group, [&](auto group) {
      constexpr int G = group();
      const unsigned blocks = tah::blocks_of(int64_t(t.all_whole_tiles()) * tah::Geometry<G>::kLanes, tah::kThreads);
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
