// fp8 and fixed_point: decode one payload or the sum of several; whole chunks of channels are in channel.cu.
#include "scaled_codes.cuh"

namespace megatron_compress {
namespace {

constexpr int kThreads = 256;
constexpr int kUnroll = 4;  // chunks a thread, // Which scale belongs to an element: of groups, and of channels. The elements of a chunk share one in whole groups.
struct Groups {
  static constexpr bool kShared = true;
  int64_t divisor;  // chunks of a group
  int shift;        // its logarithm if it is a power of two, else -1

  __device__ __forceinline__ int64_t of(int64_t chunk, int) const {
    return shift >= 0 ? chunk >> shift : int64_t(uint32_t(chunk) / uint32_t(divisor));
  }
};

struct AnyGroups {
  static constexpr bool kShared = false;
  int64_t size;
  __device__ __forceinline__ int64_t of(int64_t chunk, int i) const { return (chunk * 8 + i) / size; }
};

struct AnyChannels {
  static constexpr bool kShared = false;
  int64_t count;
  __device__ __forceinline__ int64_t of(int64_t chunk, int i) const { return (chunk * 8 + i) % count; }
};

template <class Code, class Index>
__device__ __forceinline__ void load_factors(const ScaledPayloads& p, int rank, const Index& index, int64_t chunk,
                                             int count, float (&factor)[8]) {
  const float shared = Index::kShared ? Code::factor(scale_at<Code>(p, rank, index.of(chunk, 0))) : 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i)
    factor[i] = Index::kShared || i >= count ? shared : Code::factor(scale_at<Code>(p, rank, index.of(chunk, i)));
}

// kWhole: all chunks of the block exist and have eight elements.
template <class Code, class Index, bool kSum, bool kWhole>
__device__ __forceinline__ void decode_block(const ScaledPayloads& p, void* out, DType dtype, int64_t numel,
                                             const Index& index, bool aligned) {
  const float limit = kSum ? kFloatMax : largest_finite(dtype);
  const int64_t first = int64_t(blockIdx.x) * kUnroll * kThreads + threadIdx.x;
  const auto chunk = [&](int u) { return kWhole ? first + u * kThreads : min(first + u * kThreads, (numel - 1) / 8); };
  const auto count = [&](int u) { return kWhole ? 8 : int(min(int64_t(8), numel - chunk(u) * 8)); };
  float total[kUnroll][8];
  for (int rank = 0; rank < (kSum ? p.ranks : 1); ++rank) {
    Codes codes[kUnroll];
    float factor[kUnroll][8];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      codes[u] = load_codes<Code::kBits>(p.codes.data + rank * p.codes.stride, numel, chunk(u), count(u));
      load_factors<Code>(p, rank, index, chunk(u), count(u), factor[u]);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      float v[8];
      Code::decode(codes[u], v);
      scale_chunk(v, factor[u], fits<Code>(factor[u], limit), limit);
#pragma unroll
      for (int i = 0; i < 8; ++i) total[u][i] = kSum && rank ? total[u][i] + v[i] : v[i];
    }
  }
#pragma unroll
  for (int u = 0; u < kUnroll; ++u)
    if (kWhole || (first + u * kThreads) * 8 < numel) store_chunk(out, dtype, chunk(u), count(u), aligned, total[u]);
}

template <class Code, class Index, bool kSum>
__global__ void __launch_bounds__(kThreads) decode_kernel(ScaledPayloads p, void* out, DType dtype, int64_t numel,
                                                          Index index, bool aligned) {
  if (int64_t(blockIdx.x + 1) * (kUnroll * kThreads * 8) <= numel) {
    decode_block<Code, Index, kSum, true>(p, out, dtype, numel, index, aligned);
  } else {
    decode_block<Code, Index, kSum, false>(p, out, dtype, numel, index, aligned);
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

void channel_decode_any(ScaledPayloads payloads, void* out, DType dtype, int64_t numel, int64_t channels, int bits,
                        cudaStream_t stream) {
  decode(payloads, out, dtype, numel, AnyChannels{channels}, bits, stream);
}

}  // namespace megatron_compress
