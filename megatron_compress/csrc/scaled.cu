// Kernels of fp8 and of fixed_point with groups: encode, decode and sum, decode and sum and encode.
#include "scaled_codes.cuh"

namespace megatron_compress {
namespace {

constexpr int kThreads = 256;
constexpr int kUnroll = 4;                    // chunks of eight elements a thread, so that loads overlap
constexpr int kWarpChunks = 32 * kUnroll;     // consecutive chunks of a warp
constexpr int kMaxFastGroup = 256;            // groups that one warp holds, eight elements a thread

// Sources of elements, eight at a time: the tensor itself, and the sum of decoded payloads rounded to dtype.
struct FromTensor {
  const void* x;
  DType dtype;
  bool aligned;

  __device__ __forceinline__ void load(int64_t chunk, int count, float (&v)[8]) const {
    load_chunk(x, dtype, chunk, count, aligned, v);
  }
};

// index(i): the scale of the chunk's element i.
template <class Code, class Index>
__device__ __forceinline__ void decode_chunk(const Code& code, const ScaledPayloads& p, int64_t numel, int64_t chunk,
                                             int count, float limit, Index index, float (&total)[8]) {
  for (int rank = 0; rank < p.ranks; ++rank) {
    uint32_t codes[8];
    load_codes(p.codes.data + rank * p.codes.stride, numel, chunk, count, code.bits(), codes);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float factor = i < count ? code.factor(scale_at<Code>(p, rank, index(i))) : 0.0f;
      const float part = saturate(code.decode(codes[i]) * factor, limit);
      total[i] = rank ? total[i] + part : part;
    }
  }
}

template <class Code>
struct FromPayloads {
  Code code;
  ScaledPayloads payloads;
  DType dtype;
  int64_t numel;
  int group_size;

  __device__ __forceinline__ void load(int64_t chunk, int count, float (&v)[8]) const {
    const int64_t group = chunk * 8 / group_size;
    decode_chunk(code, payloads, numel, chunk, count, kFloatMax, [&](int) { return group; }, v);
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = round_to(v[i], dtype);
  }
};

// kLanes threads share a group of 8 * kLanes elements.
template <class Code, class Source, int kLanes>
__global__ void __launch_bounds__(kThreads) encode_groups(Code code, Source source, int64_t numel, uint8_t* codes,
                                                          typename Code::Scale* scales) {
  extern __shared__ uint8_t staging[];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, bits = code.bits();
  const int64_t chunks = numel / (8 * kLanes) * kLanes;
  const int64_t first = (int64_t(blockIdx.x) * (kThreads / 32) + warp) * kWarpChunks;
  if (first >= chunks) return;
  float v[kUnroll][8];
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int64_t chunk = first + u * 32 + lane;
    source.load(chunk, chunk < chunks ? 8 : 0, v[u]);
  }
  uint8_t* stage = staging + warp * kWarpChunks * 8;
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int64_t chunk = first + u * 32 + lane;
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) largest = max_nan(largest, fabsf(v[u][i]));
    const typename Code::Scale scale = code.scale_of(max_across_lanes<kLanes>(largest));
    const float step = code.step(scale);
    uint32_t out[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) out[i] = code.encode(v[u][i] * step);
    if (chunk < chunks && lane % kLanes == 0) scales[chunk / kLanes] = scale;
    if (bits > 8 || bits % 4 == 0) {  // whole words, or two streams
      if (chunk < chunks) store_codes(codes, numel, chunk, 8, bits, out);
    } else {
      store_stream(stage + (u * 32 + lane) * bits, pack_chunk(out, bits), bits);
    }
  }
  if (bits > 8 || bits % 4 == 0) return;
  __syncwarp();
  const int bytes = int(min(int64_t(kWarpChunks), chunks - first)) * bits;
  uint8_t* target = codes + first * bits;
  for (int i = lane; i < bytes / 4; i += 32)
    reinterpret_cast<uint32_t*>(target)[i] = reinterpret_cast<const uint32_t*>(stage)[i];
  for (int i = bytes / 4 * 4 + lane; i < bytes; i += 32) target[i] = stage[i];
}

// Groups of any size, and tails: a warp finds the scale of each group from `first_group` on ...
template <class Code>
__global__ void __launch_bounds__(kThreads) find_scales(Code code, const void* x, DType dtype, int64_t numel,
                                                        int group_size, int64_t first_group, int64_t num_groups,
                                                        typename Code::Scale* scales) {
  const int64_t group = first_group + int64_t(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;
  if (group >= num_groups) return;
  const int64_t end = min(numel, (group + 1) * group_size);
  float largest = 0.0f;
  for (int64_t i = group * group_size + threadIdx.x % 32; i < end; i += 32)
    largest = max_nan(largest, fabsf(read_item(x, dtype, i)));
  largest = max_across_lanes<32>(largest);
  if (threadIdx.x % 32 == 0) scales[group] = code.scale_of(largest);
}

// ... and these quantize what lies from chunk `first_chunk` on.
template <class Code>
__global__ void __launch_bounds__(kThreads) quantize_any(Code code, const void* x, DType dtype, int64_t numel,
                                                         int group_size, int64_t first_chunk, bool aligned,
                                                         const typename Code::Scale* scales, uint8_t* codes) {
  const int64_t chunk = first_chunk + int64_t(blockIdx.x) * kThreads + threadIdx.x;
  const int count = int(min(int64_t(8), numel - chunk * 8));
  if (count <= 0) return;
  float v[8];
  load_chunk(x, dtype, chunk, count, aligned, v);
  uint32_t out[8];
#pragma unroll
  for (int i = 0; i < 8; ++i)
    out[i] = i < count ? code.encode(v[i] * code.step(scales[(chunk * 8 + i) / group_size])) : 0u;
  store_codes(codes, numel, chunk, count, code.bits(), out);
}

template <class Code>
__global__ void __launch_bounds__(kThreads) decode_any(Code code, ScaledPayloads p, void* out, DType dtype,
                                                       int64_t numel, int group_size, bool aligned) {
  const float limit = p.ranks == 1 ? largest_finite(dtype) : kFloatMax;
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int64_t chunk = (int64_t(blockIdx.x) * kUnroll + u) * kThreads + threadIdx.x;
    const int count = int(min(int64_t(8), numel - chunk * 8));
    if (count <= 0) return;
    float total[8];
    if (group_size % 8 == 0) {
      const int64_t group = chunk / (group_size / 8);
      decode_chunk(code, p, numel, chunk, count, limit, [&](int) { return group; }, total);
    } else {
      decode_chunk(code, p, numel, chunk, count, limit, [&](int i) { return (chunk * 8 + i) / group_size; }, total);
    }
    store_chunk(out, dtype, chunk, count, aligned, total);
  }
}

unsigned blocks_of(int64_t items, int64_t per_block) { return unsigned((items + per_block - 1) / per_block); }

bool is_fast(int group_size) {
  return group_size >= 8 && group_size <= kMaxFastGroup && (group_size & (group_size - 1)) == 0;
}

template <class Code, class Source>
void encode_whole_groups(Code code, Source source, int64_t numel, uint8_t* codes, typename Code::Scale* scales,
                         int group_size, cudaStream_t stream) {
  const unsigned blocks = blocks_of(numel / group_size * (group_size / 8), kWarpChunks * (kThreads / 32));
  const int shared = kThreads / 32 * kWarpChunks * 8;
  if (blocks == 0) return;
  const auto launch = [&](auto lanes) {
    encode_groups<Code, Source, lanes()><<<blocks, kThreads, shared, stream>>>(code, source, numel, codes, scales);
  };
  switch (group_size / 8) {
    case 1: return launch(std::integral_constant<int, 1>());
    case 2: return launch(std::integral_constant<int, 2>());
    case 4: return launch(std::integral_constant<int, 4>());
    case 8: return launch(std::integral_constant<int, 8>());
    case 16: return launch(std::integral_constant<int, 16>());
    case 32: return launch(std::integral_constant<int, 32>());
  }
}

template <class Code>
void encode(Code code, const void* x, DType dtype, int64_t numel, uint8_t* codes, void* scales, int group_size,
            cudaStream_t stream) {
  auto* out = static_cast<typename Code::Scale*>(scales);
  const bool aligned = is_aligned_16(x);
  const int64_t first_group = is_fast(group_size) ? numel / group_size : 0;
  const int64_t num_groups = (numel + group_size - 1) / group_size, first = first_group * group_size;
  if (first_group) encode_whole_groups(code, FromTensor{x, dtype, aligned}, numel, codes, out, group_size, stream);
  if (first_group == num_groups) return;
  find_scales<<<blocks_of(num_groups - first_group, kThreads / 32), kThreads, 0, stream>>>(
      code, x, dtype, numel, group_size, first_group, num_groups, out);
  quantize_any<<<blocks_of(numel - first, 8 * kThreads), kThreads, 0, stream>>>(code, x, dtype, numel, group_size,
                                                                               first / 8, aligned, out, codes);
}

template <class Code>
void decode(Code code, ScaledPayloads payloads, void* out, DType dtype, int64_t numel, int group_size,
            cudaStream_t stream) {
  decode_any<<<blocks_of(numel, 8 * kThreads * kUnroll), kThreads, 0, stream>>>(code, payloads, out, dtype, numel,
                                                                               group_size, is_aligned_16(out));
}

}  // namespace

void scaled_encode(const void* x, DType dtype, int64_t numel, uint8_t* codes, void* scales, int group_size, int bits,
                   cudaStream_t stream) {
  if (bits == 0) return encode(Fp8Code(8), x, dtype, numel, codes, scales, group_size, stream);
  encode(FixedPointCode(bits), x, dtype, numel, codes, scales, group_size, stream);
}

bool can_requantize(int group_size, int64_t numel) { return is_fast(group_size) && numel % group_size == 0; }

void scaled_requantize(ScaledPayloads payloads, DType dtype, int64_t numel, uint8_t* codes, void* scales,
                       int group_size, int bits, cudaStream_t stream) {
  const auto requantize = [&](auto code) {
    using Code = decltype(code);
    encode_whole_groups(code, FromPayloads<Code>{code, payloads, dtype, numel, group_size}, numel, codes,
                        static_cast<typename Code::Scale*>(scales), group_size, stream);
  };
  bits == 0 ? requantize(Fp8Code(8)) : requantize(FixedPointCode(bits));
}

void scaled_decode(ScaledPayloads payloads, void* out, DType dtype, int64_t numel, int group_size, int bits,
                   cudaStream_t stream) {
  if (bits == 0) return decode(Fp8Code(8), payloads, out, dtype, numel, group_size, stream);
  decode(FixedPointCode(bits), payloads, out, dtype, numel, group_size, stream);
}

}  // namespace megatron_compress
