// fp8 and fixed_point, groups and channels: decode one payload or the sum of several.
#include "scaled_codes.cuh"

namespace megatron_compress {
namespace {

constexpr int kThreads = 256;
constexpr int kUnroll = 4;  // chunks a thread, so that loads overlap

// Which scale belongs to an element: of groups, and of channels. Whole chunks share one, or have eight neighbours.
struct Groups {
  static constexpr bool kShared = true;
  int64_t divisor;  // chunks of a group
  int shift;        // its logarithm if it is a power of two, else -1

  __device__ __forceinline__ int64_t first(int64_t chunk) const {
    return shift >= 0 ? chunk >> shift : int64_t(uint32_t(chunk) / uint32_t(divisor));
  }
};

struct AnyGroups {
  static constexpr bool kShared = false, kNeighbours = false;
  int64_t size;
  __device__ __forceinline__ int64_t first(int64_t) const { return 0; }
  __device__ __forceinline__ int64_t of(int64_t chunk, int64_t, int i) const { return (chunk * 8 + i) / size; }
};

struct Channels {
  static constexpr bool kShared = false, kNeighbours = true;
  int64_t chunks;  // of a row
  __device__ __forceinline__ int64_t first(int64_t chunk) const {
    return int64_t(uint32_t(chunk) % uint32_t(chunks)) * 8;
  }
  __device__ __forceinline__ int64_t of(int64_t, int64_t first, int i) const { return first + i; }
};

struct AnyChannels {
  static constexpr bool kShared = false, kNeighbours = false;
  int64_t count;
  __device__ __forceinline__ int64_t first(int64_t) const { return 0; }
  __device__ __forceinline__ int64_t of(int64_t chunk, int64_t, int i) const { return (chunk * 8 + i) % count; }
};

template <class Code, class Index>
__device__ __forceinline__ void load_factors(const ScaledPayloads& p, int rank, const Index& index, int64_t chunk,
                                             int count, float (&factor)[8]) {
  const int64_t first = index.first(chunk);
  if constexpr (Index::kShared) {
    const float shared = Code::factor(scale_at<Code>(p, rank, first));
#pragma unroll
    for (int i = 0; i < 8; ++i) factor[i] = shared;
  } else if (Index::kNeighbours && (reinterpret_cast<uintptr_t>(p.scales.data) + rank * p.scales.stride) % 16 == 0) {
    const auto* eight = reinterpret_cast<const typename Code::Scale*>(p.scales.data + rank * p.scales.stride) + first;
    alignas(16) typename Code::Scale scales[8];
#pragma unroll
    for (int i = 0; i < int(sizeof(scales) / 16); ++i)
      reinterpret_cast<uint4*>(scales)[i] = reinterpret_cast<const uint4*>(eight)[i];
#pragma unroll
    for (int i = 0; i < 8; ++i) factor[i] = Code::factor(scales[i]);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i)
      factor[i] = i < count ? Code::factor(scale_at<Code>(p, rank, index.of(chunk, first, i))) : 0.0f;
  }
}

template <class Code, class Index, bool kSum>
__global__ void __launch_bounds__(kThreads) decode_kernel(ScaledPayloads p, void* out, DType dtype, int64_t numel,
                                                          Index index, bool aligned) {
  const float limit = kSum ? kFloatMax : largest_finite(dtype);
  const int64_t block_chunk = int64_t(blockIdx.x) * kUnroll * kThreads + threadIdx.x;
  const int64_t chunks = (numel + 7) / 8;
  float total[kUnroll][8];
  for (int rank = 0; rank < (kSum ? p.ranks : 1); ++rank) {
    Codes codes[kUnroll];
    float factor[kUnroll][8];
    int count[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t chunk = min(block_chunk + u * kThreads, chunks - 1);
      count[u] = int(min(int64_t(8), numel - chunk * 8));
      codes[u] = load_codes<Code::kBits>(p.codes.data + rank * p.codes.stride, numel, chunk, count[u]);
      load_factors<Code>(p, rank, index, chunk, count[u], factor[u]);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      float v[8];
      Code::decode(codes[u], v);
      scale_chunk<Code>(v, factor[u], limit);
#pragma unroll
      for (int i = 0; i < 8; ++i) total[u][i] = kSum && rank ? total[u][i] + v[i] : v[i];
    }
  }
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int64_t chunk = block_chunk + u * kThreads;
    if (chunk < chunks) store_chunk(out, dtype, chunk, int(min(int64_t(8), numel - chunk * 8)), aligned, total[u]);
  }
}

template <class Index>
void decode(ScaledPayloads payloads, void* out, DType dtype, int64_t numel, Index index, int bits,
            cudaStream_t stream) {
  with_code(bits, [&](auto code) {
    using Code = decltype(code);
    const auto kernel = payloads.ranks > 1 ? decode_kernel<Code, Index, true> : decode_kernel<Code, Index, false>;
    kernel<<<blocks_of(numel, 8 * kThreads * kUnroll), kThreads, 0, stream>>>(payloads, out, dtype, numel, index,
                                                                            is_aligned_16(out));
  });
}

}  // namespace

void scaled_decode(ScaledPayloads payloads, void* out, DType dtype, int64_t numel, int group_size, int bits,
                   cudaStream_t stream) {
  if (group_size % 8) return decode(payloads, out, dtype, numel, AnyGroups{group_size}, bits, stream);
  Groups groups{group_size / 8, -1};
  for (int shift = 0; shift < 16; ++shift)
    if (1 << shift == group_size / 8) groups.shift = shift;
  decode(payloads, out, dtype, numel, groups, bits, stream);
}

void channel_decode(ScaledPayloads payloads, void* out, DType dtype, int64_t rows, int64_t channels, int bits,
                    cudaStream_t stream) {
  const int64_t numel = rows * channels;
  if (channels % 8) return decode(payloads, out, dtype, numel, AnyChannels{channels}, bits, stream);
  decode(payloads, out, dtype, numel, Channels{channels / 8}, bits, stream);
}

}  // namespace megatron_compress
