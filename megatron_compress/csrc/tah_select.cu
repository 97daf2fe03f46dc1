// Which windows are high: the k of a sample with the largest keys, ties by index, and how many lie before each.
#include "scaled_codes.cuh"
#include "tah_quant.cuh"

namespace megatron_compress::tah {
namespace {

constexpr int kThreads = 256;
constexpr int kScanThreads = 1024;
constexpr int kSegment = 64;

// Exclusive prefix sum over a block, and the total; every thread calls it.
template <int kBlock>
__device__ uint32_t exclusive_scan(uint32_t value, uint32_t& total) {
  __shared__ uint32_t sums[kBlock / 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint32_t inclusive = value;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const uint32_t other = __shfl_up_sync(kAllLanes, inclusive, distance);
    if (lane >= distance) inclusive += other;
  }
  __syncthreads();
  if (lane == 31) sums[warp] = inclusive;
  __syncthreads();
  uint32_t before = 0;
  total = 0;
#pragma unroll
  for (int i = 0; i < kBlock / 32; ++i) {
    if (i < warp) before += sums[i];
    total += sums[i];
  }
  return before + inclusive - value;
}

// A segment is what one block treats: kSegment words of a sample's flags.
uint32_t segments_of(const TahTiling& t) { return (t.words() + kSegment - 1) / kSegment; }

// Each block finds its sample's threshold in the histogram, then flags the keys of its segment above it (x) and equal
// to it (y), with their counts before each word of the segment (z, w) and over the segment.
__global__ void __launch_bounds__(kThreads) flag_candidates(TahTiling t, const uint16_t* keys,
                                                            const uint32_t* histogram, uint4* candidates,
                                                            uint2* segments, uint32_t* ties) {
  constexpr int kBins = kKeys / kThreads;
  __shared__ uint32_t threshold, above;
  __shared__ uint2 flags[kSegment];
  const uint32_t sample = blockIdx.y;
  const int last = kKeys - 1 - int(threadIdx.x) * kBins;  // bins are taken from the largest key down
  uint32_t counts[kBins], sum = 0, total;
  const auto* bins = reinterpret_cast<const uint4*>(histogram + int64_t(sample) * kKeys + last + 1 - kBins);
#pragma unroll
  for (int i = 0; i < kBins; i += 4) {
    const uint4 four = bins[(kBins - i) / 4 - 1];
    counts[i] = four.w, counts[i + 1] = four.z, counts[i + 2] = four.y, counts[i + 3] = four.x;
    sum += four.x + four.y + four.z + four.w;
  }
  uint32_t before = exclusive_scan<kThreads>(sum, total);
  // The bin in which the count of larger keys reaches k; there is none if k is 0.
  if (threadIdx.x == 0) threshold = kKeys, above = 0;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kBins; ++i) {
    if (before < t.high_per_sample && before + counts[i] >= t.high_per_sample) threshold = last - i, above = before;
    before += counts[i];
  }
  __syncthreads();
  if (blockIdx.x == 0 && threadIdx.x == 0) ties[sample] = t.high_per_sample - above;
  const uint32_t limit = threshold, first = blockIdx.x * kSegment;
  const uint16_t* mine = keys + int64_t(sample) * t.words() * 32 + first * 32;
  const uint32_t left = t.sample_windows() - first * 32;
  constexpr int kSteps = kSegment / (kThreads / 32);
  uint32_t key[kSteps];
#pragma unroll
  for (int step = 0; step < kSteps; ++step) key[step] = step * kThreads + threadIdx.x < left ? mine[step * kThreads + threadIdx.x] : 0;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const bool exists = step * kThreads + threadIdx.x < left;
    const uint32_t larger = __ballot_sync(kAllLanes, exists && key[step] > limit);
    const uint32_t equal = __ballot_sync(kAllLanes, exists && key[step] == limit);
    if (threadIdx.x % 32 == 0) flags[step * (kThreads / 32) + threadIdx.x / 32] = make_uint2(larger, equal);
  }
  __syncthreads();
  const uint2 word = threadIdx.x < kSegment ? flags[threadIdx.x] : make_uint2(0, 0);
  uint2 sums;
  const uint32_t larger = exclusive_scan<kThreads>(__popc(word.x), sums.x);
  const uint32_t equal = exclusive_scan<kThreads>(__popc(word.y), sums.y);
  if (threadIdx.x < kSegment && first + threadIdx.x < t.words())
    candidates[sample * t.words() + first + threadIdx.x] = make_uint4(word.x, word.y, larger, equal);
  if (threadIdx.x == 0) segments[sample * gridDim.x + blockIdx.x] = sums;
}

// The `count` lowest set bits.
__device__ uint32_t lowest_bits(uint32_t bits, uint32_t count) {
  if (count >= uint32_t(__popc(bits))) return bits;
  uint32_t kept = 0;
  for (; count; --count) {
    kept |= bits & -bits;
    bits &= bits - 1;
  }
  return kept;
}

__global__ void __launch_bounds__(kThreads) join_candidates(TahTiling t, const uint4* candidates,
                                                            const uint2* segments, const uint32_t* ties, Word* words,
                                                            uint8_t* high_map) {
  const uint32_t sample = blockIdx.y, index = blockIdx.x * kSegment + threadIdx.x;
  uint2 before = make_uint2(0, 0);
  for (uint32_t i = threadIdx.x; i < blockIdx.x; i += kThreads) {
    before.x += segments[sample * gridDim.x + i].x;
    before.y += segments[sample * gridDim.x + i].y;
  }
  uint2 total;
  exclusive_scan<kThreads>(before.x, total.x);
  exclusive_scan<kThreads>(before.y, total.y);
  if (threadIdx.x >= kSegment || index >= t.words()) return;
  const uint4 word = candidates[sample * t.words() + index];
  const uint32_t room = ties[sample], equal_before = total.y + word.w;
  const uint32_t high = word.x | lowest_bits(word.y, room > equal_before ? room - equal_before : 0);
  words[sample * t.words() + index] = {high, total.x + word.z + min(equal_before, room)};
  if (t.sample_windows() % 8 == 0) {
    for (uint32_t byte = 0; byte < 4 && index * 32 + byte * 8 < t.sample_windows(); ++byte)
      high_map[(sample * t.sample_windows() + index * 32) / 8 + byte] = uint8_t(high >> (8 * byte));
  }
}

// The map where samples share bytes.
__global__ void __launch_bounds__(kThreads) write_map(TahTiling t, const Word* words, uint8_t* high_map) {
  const uint32_t byte = blockIdx.x * kThreads + threadIdx.x, windows = t.samples * t.sample_windows();
  if (byte * 8 >= windows) return;
  uint32_t bits = 0;
  for (uint32_t i = 0; i < 8 && byte * 8 + i < windows; ++i) {
    const uint32_t sample = (byte * 8 + i) / t.sample_windows(), local = (byte * 8 + i) % t.sample_windows();
    bits |= (words[sample * t.words() + local / 32].high >> local % 32 & 1) << i;
  }
  high_map[byte] = uint8_t(bits);
}

// Bits [first, first + 32) of a stream of `count` bits.
__device__ uint32_t read_bits(const uint8_t* stream, uint32_t count, uint32_t first) {
  uint64_t bits = 0;
#pragma unroll
  for (uint32_t i = 0; i < 5; ++i)
    if (first / 8 + i < (count + 7) / 8) bits |= uint64_t(stream[first / 8 + i]) << (8 * i);
  return uint32_t(bits >> first % 8);
}

// Word `index` of a sample's flags in the payload's map.
__device__ uint32_t flags_at(const TahTiling& t, const uint8_t* high_map, uint32_t sample, uint32_t index) {
  const uint32_t first = sample * t.sample_windows();
  if (index * 32 >= t.sample_windows()) return 0;
  const uint32_t exist = min(32u, t.sample_windows() - index * 32);
  const uint8_t* start = high_map + first / 8;
  if (exist == 32 && first % 8 == 0 && reinterpret_cast<uintptr_t>(start) % 4 == 0)
    return reinterpret_cast<const uint32_t*>(start)[index];
  const uint32_t mask = exist == 32 ? 0xffffffffu : (1u << exist) - 1;
  return read_bits(high_map, first + t.sample_windows(), first + index * 32) & mask;
}

// Number of flags in a sample's first `count` words, all of them whole: this thread's share of it.
__device__ uint32_t flags_before(const TahTiling& t, const uint8_t* high_map, uint32_t sample, uint32_t count) {
  constexpr int kLoads = 16;
  const uint32_t first = sample * t.sample_windows();
  const uint8_t* start = high_map + first / 8;
  uint32_t sum = 0;
  if (first % 8 || reinterpret_cast<uintptr_t>(start) % 4) {
    for (uint32_t i = threadIdx.x; i < count; i += kScanThreads) sum += __popc(flags_at(t, high_map, sample, i));
    return sum;
  }
  for (uint32_t i = threadIdx.x; i < count; i += kLoads * kScanThreads) {  // loads side by side
    uint32_t flags[kLoads];
#pragma unroll
    for (int k = 0; k < kLoads; ++k)
      flags[k] = i + k * kScanThreads < count ? reinterpret_cast<const uint32_t*>(start)[i + k * kScanThreads] : 0;
#pragma unroll
    for (int k = 0; k < kLoads; ++k) sum += __popc(flags[k]);
  }
  return sum;
}

// Each block counts all that lies before its words itself, then scans them.
__global__ void __launch_bounds__(kScanThreads) count_windows(TahTiling t, const uint8_t* high_map, int64_t stride,
                                                              Word* words) {
  const uint32_t sample = blockIdx.y, index = blockIdx.x * kScanThreads + threadIdx.x;
  high_map += blockIdx.z * stride;
  words += (blockIdx.z * t.samples + sample) * t.words();
  const uint32_t high = index < t.words() ? flags_at(t, high_map, sample, index) : 0;
  uint32_t before, unused;
  exclusive_scan<kScanThreads>(flags_before(t, high_map, sample, blockIdx.x * kScanThreads), before);
  before += exclusive_scan<kScanThreads>(__popc(high), unused);
  if (index < t.words()) words[index] = {high, before};
}

template <int B>
__global__ void __launch_bounds__(kThreads) pack_kernel(const uint8_t* codes, int64_t count, uint8_t* out) {
  const int64_t chunk = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  const int present = int(min(int64_t(8), count - chunk * 8));
  if (present <= 0) return;
  uint64_t stream = 0;
  for (int i = 0; i < present; ++i) stream |= uint64_t(codes[chunk * 8 + i]) << (B * i);
  store_codes<B>(out, count, chunk, present, {stream, 0});
}

}  // namespace

void select_windows(const TahTiling& t, const uint16_t* keys, const uint32_t* histogram, uint4* candidates,
                    uint2* segments, uint32_t* ties, Word* words, uint8_t* high_map, cudaStream_t stream) {
  if (t.sample_windows() == 0) return;
  const dim3 grid(segments_of(t), t.samples);
  flag_candidates<<<grid, kThreads, 0, stream>>>(t, keys, histogram, candidates, segments, ties);
  join_candidates<<<grid, kThreads, 0, stream>>>(t, candidates, segments, ties, words, high_map);
  if (t.sample_windows() % 8)
    write_map<<<megatron_compress::blocks_of(int64_t(t.samples) * t.sample_windows(), 8 * kThreads), kThreads, 0, stream>>>(t, words,
                                                                                                         high_map);
}

void read_windows(const TahTiling& t, const uint8_t* high_map, int64_t stride, int ranks, Word* words,
                  cudaStream_t stream) {
  if (t.sample_windows() == 0) return;
  count_windows<<<dim3(megatron_compress::blocks_of(t.words(), kScanThreads), t.samples, ranks), kScanThreads, 0, stream>>>(
      t, high_map, stride, words);
}

void pack_bytes(const uint8_t* codes, int64_t count, int bits, uint8_t* stream_out, cudaStream_t stream) {
  with_code(bits, [&](auto code) {
    constexpr int B = decltype(code)::kBits;
    if constexpr (B <= 8) pack_kernel<B><<<megatron_compress::blocks_of(count, 8 * kThreads), kThreads, 0, stream>>>(codes, count, stream_out);
  });
}

}  // namespace megatron_compress::tah
