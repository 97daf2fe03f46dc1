// Which windows are high: the k of a sample with the largest keys, ties by index, and how many lie before each.
#include "scaled_codes.cuh"
#include "tah_quant.cuh"

namespace megatron_compress::tah {
namespace {

constexpr int kThreads = 256;
constexpr int kScanThreads = 1024;

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

// Each block finds its sample's threshold in the histogram, then flags keys above it (x) and equal to it (y), and
// notes how many of the equal ones are high.
__global__ void __launch_bounds__(kThreads) flag_candidates(TahTiling t, const uint16_t* keys,
                                                            const uint32_t* histogram, uint2* candidates,
                                                            uint32_t* ties) {
  constexpr int kBins = kKeys / kThreads;
  __shared__ uint32_t threshold, above;
  const uint32_t sample = blockIdx.y;
  const int last = kKeys - 1 - int(threadIdx.x) * kBins;  // bins are taken from the largest key down
  uint32_t counts[kBins], sum = 0, total;
#pragma unroll
  for (int i = 0; i < kBins; ++i) sum += counts[i] = histogram[int64_t(sample) * kKeys + last - i];
  uint32_t before = exclusive_scan<kThreads>(sum, total);
  // The bin in which the count of larger keys reaches k; there is none if k is 0.
  if (threadIdx.x == 0) threshold = kKeys, above = 0;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kBins; ++i) {
    if (before < t.high_per_sample && before + counts[i] >= t.high_per_sample)
      threshold = last - i, above = before;
    before += counts[i];
  }
  __syncthreads();
  if (blockIdx.x == 0 && threadIdx.x == 0) ties[sample] = t.high_per_sample - above;
  const uint32_t limit = threshold;
  for (uint32_t word = blockIdx.x * (kThreads / 32) + threadIdx.x / 32; word < t.words();
       word += gridDim.x * (kThreads / 32)) {
    const uint32_t local = word * 32 + threadIdx.x % 32;
    const bool exists = local < t.sample_windows();
    const uint32_t key = exists ? keys[sample * (t.words() * 32) + local] : 0;
    const uint32_t larger = __ballot_sync(kAllLanes, exists && key > limit);
    const uint32_t equal = __ballot_sync(kAllLanes, exists && key == limit);
    if (threadIdx.x % 32 == 0) candidates[sample * t.words() + word] = make_uint2(larger, equal);
  }
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

// One block a sample; each thread takes `share` words that follow each other.
__global__ void __launch_bounds__(kScanThreads) join_candidates(TahTiling t, const uint2* candidates,
                                                                const uint32_t* ties, Word* words,
                                                                uint8_t* high_map) {
  const uint32_t sample = blockIdx.x, share = (t.words() + kScanThreads - 1) / kScanThreads;
  const uint32_t begin = min(t.words(), threadIdx.x * share), end = min(t.words(), begin + share);
  const uint2* mine = candidates + sample * t.words();
  uint32_t larger = 0, equal = 0, total;
#pragma unroll 4
  for (uint32_t i = begin; i < end; ++i) {
    larger += __popc(mine[i].x);
    equal += __popc(mine[i].y);
  }
  uint32_t larger_before = exclusive_scan<kScanThreads>(larger, total);
  uint32_t equal_before = exclusive_scan<kScanThreads>(equal, total);
  const uint32_t room = ties[sample];
#pragma unroll 4
  for (uint32_t i = begin; i < end; ++i) {
    const uint2 word = mine[i];
    const uint32_t left = room > equal_before ? room - equal_before : 0;
    const uint32_t high = word.x | lowest_bits(word.y, left);
    words[sample * t.words() + i] = {high, larger_before + min(equal_before, room)};
    larger_before += __popc(word.x);
    equal_before += __popc(word.y);
    if (t.sample_windows() % 8 == 0) {
      for (uint32_t byte = 0; byte < 4 && i * 32 + byte * 8 < t.sample_windows(); ++byte)
        high_map[(sample * t.sample_windows() + i * 32) / 8 + byte] = uint8_t(high >> (8 * byte));
    }
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

__global__ void __launch_bounds__(kScanThreads) count_windows(TahTiling t, const uint8_t* high_map, int64_t stride,
                                                              Word* words) {
  const uint32_t sample = blockIdx.x, share = (t.words() + kScanThreads - 1) / kScanThreads;
  const uint32_t begin = min(t.words(), threadIdx.x * share), end = min(t.words(), begin + share);
  const uint32_t first = sample * t.sample_windows(), count = first + t.sample_windows();
  high_map += blockIdx.y * stride;
  words += (blockIdx.y * t.samples + sample) * t.words();
  uint32_t high = 0, total;
#pragma unroll 4
  for (uint32_t i = begin; i < end; ++i) {
    const uint32_t exist = min(32u, t.sample_windows() - min(t.sample_windows(), i * 32));
    const uint32_t mask = exist == 32 ? 0xffffffffu : (1u << exist) - 1;
    words[i].high = (exist ? read_bits(high_map, count, first + i * 32) : 0) & mask;
    high += __popc(words[i].high);
  }
  uint32_t before = exclusive_scan<kScanThreads>(high, total);
#pragma unroll 4
  for (uint32_t i = begin; i < end; ++i) {
    words[i].before = before;
    before += __popc(words[i].high);
  }
}

__global__ void __launch_bounds__(kThreads) pack_kernel(const uint8_t* codes, int64_t count, int bits, uint8_t* out) {
  const int64_t chunk = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  const int present = int(min(int64_t(8), count - chunk * 8));
  if (present <= 0) return;
  uint32_t eight[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) eight[i] = i < present ? codes[chunk * 8 + i] : 0;
  store_codes(out, count, chunk, present, bits, eight);
}

unsigned blocks_of(int64_t items, int64_t per_block) { return unsigned((items + per_block - 1) / per_block); }

}  // namespace

void select_windows(const TahTiling& t, const uint16_t* keys, const uint32_t* histogram, uint2* candidates,
                    uint32_t* ties, Word* words, uint8_t* high_map, cudaStream_t stream) {
  if (t.sample_windows() == 0) return;
  const unsigned blocks = blocks_of(t.words(), 8 * (kThreads / 32));
  flag_candidates<<<dim3(blocks, t.samples), kThreads, 0, stream>>>(t, keys, histogram, candidates, ties);
  join_candidates<<<t.samples, kScanThreads, 0, stream>>>(t, candidates, ties, words, high_map);
  if (t.sample_windows() % 8)
    write_map<<<blocks_of(int64_t(t.samples) * t.sample_windows(), 8 * kThreads), kThreads, 0, stream>>>(t, words,
                                                                                                         high_map);
}

void read_windows(const TahTiling& t, const uint8_t* high_map, int64_t stride, int ranks, Word* words,
                  cudaStream_t stream) {
  if (t.sample_windows()) count_windows<<<dim3(t.samples, ranks), kScanThreads, 0, stream>>>(t, high_map, stride, words);
}

void pack_bytes(const uint8_t* codes, int64_t count, int bits, uint8_t* stream_out, cudaStream_t stream) {
  if (count) pack_kernel<<<blocks_of(count, 8 * kThreads), kThreads, 0, stream>>>(codes, count, bits, stream_out);
}

}  // namespace megatron_compress::tah
