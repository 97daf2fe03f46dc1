// fp8 and fixed_point with groups: encode, and the payload of the sum of several.
#include "scaled_codes.cuh"

namespace megatron_compress {
namespace {

constexpr int kThreads = 256;
constexpr int kMaxFastGroup = 256;  // what a warp holds at eight elements a thread

// Sources of chunks, those of one thread 32 apart: the tensor itself, and the sum of decoded payloads rounded to dtype.
// `fetch` starts the loads of kUnroll chunks; those from `end` on do not exist.
template <int kItem>
struct FromTensor {
  static constexpr int kUnroll = 4;
  const uint8_t* x;
  DType dtype;
  bool aligned;

  using Fetched = Eight<kItem>;

  __device__ __forceinline__ void fetch(int64_t first, int64_t end, Fetched (&fetched)[kUnroll]) const {
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      fetched[u] = {};
      if (first + u * 32 < end) fetched[u] = Fetched::load(x + (first + u * 32) * (8 * kItem), aligned);
    }
  }

  __device__ __forceinline__ void values(const Fetched& f, float (&v)[8]) const { f.values(dtype, v); }
};

template <class Code>
struct FromPayloads {
  static constexpr int kUnroll = 2;
  ScaledPayloads payloads;
  DType dtype;
  int64_t numel;
  int log2_lanes;

  struct Fetched {
    float total[8];
  };

  __device__ __forceinline__ void fetch(int64_t first, int64_t end, Fetched (&fetched)[kUnroll]) const {
    for (int rank = 0; rank < payloads.ranks; ++rank) {
      Codes codes[kUnroll];
      float factor[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int64_t chunk = min(first + u * 32, end - 1);
        codes[u] = load_codes<Code::kBits>(payloads.codes.data + rank * payloads.codes.stride, numel, chunk, 8);
        factor[u] = Code::factor(scale_at<Code>(payloads, rank, chunk >> log2_lanes));
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const float all[8] = {factor[u], factor[u], factor[u], factor[u], factor[u], factor[u], factor[u], factor[u]};
        float v[8];
        Code::decode(codes[u], v);
        scale_chunk(v, all, fits<Code>(all, kFloatMax), kFloatMax);
#pragma unroll
        for (int i = 0; i < 8; ++i) fetched[u].total[i] = rank ? fetched[u].total[i] + v[i] : v[i];
      }
    }
  }

  __device__ __forceinline__ void values(const Fetched& f, float (&v)[8]) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = round_to(f.total[i], dtype);
  }
};

// 2^log2_lanes threads share a group of eight elements each.
template <class Code, class Source>
__global__ void __launch_bounds__(kThreads) encode_groups(Source source, int64_t numel, uint8_t* codes,
                                                          typename Code::Scale* scales, int64_t chunks,
                                                          int log2_lanes) {
  constexpr int B = Code::kBits, kUnroll = Source::kUnroll, kWarpChunks = 32 * kUnroll;
  constexpr bool kStaged = B < 8 && B != 4;  // chunks that are no whole words are joined in shared memory
  __shared__ alignas(8) uint8_t staging[kStaged ? kThreads / 32 * kWarpChunks * B : 1];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, lanes = 1 << log2_lanes;
  const int64_t first = (int64_t(blockIdx.x) * (kThreads / 32) + warp) * kWarpChunks;
  if (first >= chunks) return;
  typename Source::Fetched fetched[kUnroll];
  source.fetch(first + lane, chunks, fetched);
  uint8_t* stage = staging + (kStaged ? warp * kWarpChunks * B : 0);
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int64_t chunk = first + u * 32 + lane;
    float v[8];
    source.values(fetched[u], v);
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) largest = max_nan(largest, fabsf(v[i]));
    for (int distance = 1; distance < lanes; distance *= 2)
      largest = max_nan(largest, __shfl_xor_sync(kAllLanes, largest, distance));
    const typename Code::Scale scale = Code::scale_of(largest);
    const float common = Code::step(scale), step[8] = {common, common, common, common, common, common, common, common};
    quantize_chunk<Code>(v, step, common == common, largest);
    const Codes out = Code::encode(v);
    if (chunk < chunks && (lane & (lanes - 1)) == 0) scales[chunk >> log2_lanes] = scale;
    if constexpr (kStaged) {
      store_stream<B>(stage + (u * 32 + lane) * B, out.low, B);
    } else {
      if (chunk < chunks) store_codes<B>(codes, numel, chunk, 8, out);
    }
  }
  if constexpr (kStaged) {
    __syncwarp();
    const int bytes = int(min(int64_t(kWarpChunks), chunks - first)) * B;
    uint8_t* target = codes + first * B;
    for (int i = lane; i < bytes / 4; i += 32)
      reinterpret_cast<uint32_t*>(target)[i] = reinterpret_cast<const uint32_t*>(stage)[i];
    for (int i = bytes / 4 * 4 + lane; i < bytes; i += 32) target[i] = stage[i];
  }
}

// Groups of any size, and tails: a warp finds the scale of each group from `first_group` on ...
template <class Code>
__global__ void __launch_bounds__(kThreads) find_scales(const void* x, DType dtype, int64_t numel, int group_size,
                                                        int64_t first_group, int64_t num_groups,
                                                        typename Code::Scale* scales) {
  const int64_t group = first_group + int64_t(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;
  if (group >= num_groups) return;
  const int64_t end = min(numel, (group + 1) * group_size);
  float largest = 0.0f;
  for (int64_t i = group * group_size + threadIdx.x % 32; i < end; i += 32)
    largest = max_nan(largest, fabsf(read_item(x, dtype, i)));
  largest = max_across_lanes<32>(largest);
  if (threadIdx.x % 32 == 0) scales[group] = Code::scale_of(largest);
}

// ... and these quantize what lies from chunk `first_chunk` on.
template <class Code>
__global__ void __launch_bounds__(kThreads) quantize_any(const void* x, DType dtype, int64_t numel, int group_size,
                                                         int64_t first_chunk, const typename Code::Scale* scales,
                                                         uint8_t* codes) {
  quantize_slowly<Code>(
      x, dtype, numel, first_chunk + int64_t(blockIdx.x) * kThreads + threadIdx.x,
      [&](int64_t i) { return Code::step(scales[i / group_size]); }, codes);
}

int log2_lanes(int group_size) {
  int log2 = 0;
  while ((8 << log2) < group_size) ++log2;
  return log2;
}

bool is_fast(int group_size) {
  return group_size >= 8 && group_size <= kMaxFastGroup && (group_size & (group_size - 1)) == 0;
}

template <class Code, class Source>
void encode_whole_groups(Source source, int64_t numel, uint8_t* codes, void* scales, int group_size,
                         cudaStream_t stream) {
  const int64_t chunks = numel / group_size * (group_size / 8);
  if (chunks == 0) return;
  encode_groups<Code><<<blocks_of(chunks, kThreads * Source::kUnroll), kThreads, 0, stream>>>(
      source, numel, codes, static_cast<typename Code::Scale*>(scales), chunks, log2_lanes(group_size));
}

}  // namespace

void scaled_encode(const void* x, DType dtype, int64_t numel, uint8_t* codes, void* scales, int group_size, int bits,
                   cudaStream_t stream) {
  const int64_t first_group = is_fast(group_size) ? numel / group_size : 0;
  const int64_t num_groups = (numel + group_size - 1) / group_size, first = first_group * group_size;
  with_code(bits, [&](auto code) {
    using Code = decltype(code);
    auto* out = static_cast<typename Code::Scale*>(scales);
    if (first_group) {
      const auto* bytes = static_cast<const uint8_t*>(x);
      if (item_bytes(dtype) == 4)
        encode_whole_groups<Code>(FromTensor<4>{bytes, dtype, is_aligned_16(x)}, numel, codes, scales, group_size, stream);
      else
        encode_whole_groups<Code>(FromTensor<2>{bytes, dtype, is_aligned_16(x)}, numel, codes, scales, group_size, stream);
    }
    if (first_group == num_groups) return;
    find_scales<Code><<<blocks_of(num_groups - first_group, kThreads / 32), kThreads, 0, stream>>>(
        x, dtype, numel, group_size, first_group, num_groups, out);
    quantize_any<Code><<<blocks_of(numel - first, 8 * kThreads), kThreads, 0, stream>>>(x, dtype, numel, group_size,
                                                                                       first / 8, out, codes);
  });
}

bool can_requantize(int group_size, int64_t numel) { return is_fast(group_size) && numel % group_size == 0; }

void scaled_requantize(ScaledPayloads payloads, DType dtype, int64_t numel, uint8_t* codes, void* scales,
                       int group_size, int bits, cudaStream_t stream) {
  with_code(bits, [&](auto code) {
    using Code = decltype(code);
    encode_whole_groups<Code>(FromPayloads<Code>{payloads, dtype, numel, log2_lanes(group_size)}, numel, codes, scales,
                              group_size, stream);
  });
}

}  // namespace megatron_compress
