// The CUDA side of the ops whose schemas stand in megatron_compress/ops; Python checks values, this checks memory.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include "kernels.h"

namespace megatron_compress {
namespace {

using at::Tensor;

DType dtype_of(at::ScalarType type) {
  switch (type) {
    case at::kFloat: return DType::kFloat32;
    case at::kBFloat16: return DType::kBFloat16;
    case at::kHalf: return DType::kFloat16;
    default: TORCH_CHECK(false, "a float32, bfloat16 or float16 tensor is needed, got ", type);
  }
}

// One device and stream for a call; every argument must live there.
struct Call {
  c10::cuda::CUDAGuard guard;
  cudaStream_t stream;

  explicit Call(const Tensor& tensor) : guard(tensor.device()), stream(c10::cuda::getCurrentCUDAStream().stream()) {}
  ~Call() noexcept(false) { C10_CUDA_KERNEL_LAUNCH_CHECK(); }
};

void check_dense(const Tensor& tensor, const char* name, const Tensor& beside) {
  TORCH_CHECK(tensor.is_contiguous(), name, " must be contiguous, got strides ", tensor.strides());
  TORCH_CHECK(tensor.device() == beside.device(), name, " is on ", tensor.device(), ", others on ", beside.device());
}

void check_aligned(const void* pointer, const char* name) {
  TORCH_CHECK(reinterpret_cast<uintptr_t>(pointer) % 16 == 0, name, " must begin at a multiple of 16 bytes");
}

template <class T>
T* section(const Tensor& tensor, const char* name, const Tensor& beside, bool aligned = false) {
  check_dense(tensor, name, beside);
  if (aligned) check_aligned(tensor.data_ptr(), name);
  return static_cast<T*>(tensor.data_ptr());
}

Rows rows_of(const Tensor& stacked, const char* name, const Tensor& beside, bool aligned = false) {
  TORCH_CHECK(stacked.dim() == 2 && (stacked.size(1) <= 1 || stacked.stride(1) == 1), name,
              " must be [ranks, n] with dense rows, got ", stacked.sizes(), " of strides ", stacked.strides());
  TORCH_CHECK(stacked.device() == beside.device(), name, " is on ", stacked.device(), ", others on ", beside.device());
  const int64_t stride = stacked.stride(0) * stacked.element_size();
  if (aligned) {
    check_aligned(stacked.data_ptr(), name);
    TORCH_CHECK(stacked.size(0) == 1 || stride % 16 == 0, name, " must have rows at multiples of 16 bytes");
  }
  return {static_cast<const uint8_t*>(stacked.data_ptr()), stride};
}

Fp4Payloads fp4_payloads(const Tensor& codes, const Tensor& scales, const Tensor& alphas, const Tensor& beside) {
  return {rows_of(codes, "codes", beside, true), rows_of(scales, "scales", beside), rows_of(alphas, "alphas", beside),
          int(codes.size(0))};
}

void fp4_quant_encode_op(const Tensor& x, Tensor& codes, Tensor& scales, Tensor& alphas, int64_t group_size, bool e3m0,
                         bool paper_clips) {
  check_dense(x, "x", x);
  Call call(x);
  fp4_quant_encode(x.data_ptr(), dtype_of(x.scalar_type()), x.numel(), section<uint8_t>(codes, "codes", x, true),
                   section<float>(scales, "scales", x), section<float>(alphas, "alphas", x),
                   {int(group_size), e3m0, alphas.numel() > 0, paper_clips}, call.stream);
}

void fp4_quant_decode_op(const Tensor& codes, const Tensor& scales, const Tensor& alphas, Tensor& out,
                         int64_t group_size, bool e3m0) {
  check_dense(out, "out", codes);
  Call call(out);
  fp4_quant_decode(fp4_payloads(codes, scales, alphas, out), out.data_ptr(), dtype_of(out.scalar_type()), out.numel(),
                   {int(group_size), e3m0, alphas.numel() > 0, false}, call.stream);
}

void fp4_quant_requantize_op(const Tensor& codes, const Tensor& scales, const Tensor& alphas, int64_t numel,
                             Tensor& codes_out, Tensor& scales_out, Tensor& alphas_out, int64_t group_size, bool e3m0,
                             bool paper_clips) {
  Call call(codes);
  fp4_quant_requantize(fp4_payloads(codes, scales, alphas, codes), numel,
                       section<uint8_t>(codes_out, "codes_out", codes, true),
                       section<float>(scales_out, "scales_out", codes),
                       section<float>(alphas_out, "alphas_out", codes),
                       {int(group_size), e3m0, alphas.numel() > 0, paper_clips}, call.stream);
}

ScaledPayloads scaled_payloads(const Tensor& codes, const Tensor& scales, const Tensor& beside) {
  return {rows_of(codes, "codes", beside, true), rows_of(scales, "scales", beside), int(codes.size(0))};
}

// bits: 0 stands for fp8.
void grouped_encode(const Tensor& x, Tensor& codes, Tensor& scales, int64_t group_size, int64_t bits) {
  check_dense(x, "x", x);
  Call call(x);
  scaled_encode(x.data_ptr(), dtype_of(x.scalar_type()), x.numel(), section<uint8_t>(codes, "codes", x, true),
                section<uint8_t>(scales, "scales", x), int(group_size), int(bits), call.stream);
}

void grouped_decode(const Tensor& codes, const Tensor& scales, Tensor& out, int64_t group_size, int64_t bits) {
  check_dense(out, "out", codes);
  Call call(out);
  scaled_decode(scaled_payloads(codes, scales, out), out.data_ptr(), dtype_of(out.scalar_type()), out.numel(),
                int(group_size), int(bits), call.stream);
}

void grouped_requantize(const Tensor& codes, const Tensor& scales, at::ScalarType dtype, int64_t numel,
                        Tensor& codes_out, Tensor& scales_out, int64_t group_size, int64_t bits) {
  if (!can_requantize(int(group_size), numel)) {
    Tensor total = at::empty({numel}, codes.options().dtype(dtype));
    grouped_decode(codes, scales, total, group_size, bits);
    return grouped_encode(total, codes_out, scales_out, group_size, bits);
  }
  Call call(codes);
  scaled_requantize(scaled_payloads(codes, scales, codes), dtype_of(dtype), numel,
                    section<uint8_t>(codes_out, "codes_out", codes, true),
                    section<uint8_t>(scales_out, "scales_out", codes), int(group_size), int(bits), call.stream);
}

void fp8_encode_op(const Tensor& x, Tensor& codes, Tensor& scales, int64_t group_size) {
  grouped_encode(x, codes, scales, group_size, 0);
}

void fp8_decode_op(const Tensor& codes, const Tensor& scales, Tensor& out, int64_t group_size) {
  grouped_decode(codes, scales, out, group_size, 0);
}

void fp8_requantize_op(const Tensor& codes, const Tensor& scales, at::ScalarType dtype, int64_t numel,
                       Tensor& codes_out, Tensor& scales_out, int64_t group_size) {
  grouped_requantize(codes, scales, dtype, numel, codes_out, scales_out, group_size, 0);
}

void channel_encode_op(const Tensor& x, Tensor& codes, Tensor& scales, int64_t bits) {
  check_dense(x, "x", x);
  Call call(x);
  const int64_t channels = scales.numel(), rows = x.numel() / channels;
  Tensor partial = at::empty({channel_partials(rows) * channels}, x.options().dtype(at::kFloat));
  channel_encode(x.data_ptr(), dtype_of(x.scalar_type()), rows, channels, section<uint8_t>(codes, "codes", x, true),
                 section<uint8_t>(scales, "scales", x), int(bits), partial.data_ptr<float>(), call.stream);
}

void channel_decode_op(const Tensor& codes, const Tensor& scales, Tensor& out, int64_t bits) {
  check_dense(out, "out", codes);
  Call call(out);
  const int64_t channels = scales.size(1);
  channel_decode(scaled_payloads(codes, scales, out), out.data_ptr(), dtype_of(out.scalar_type()),
                 out.numel() / channels, channels, int(bits), call.stream);
}

void hadamard_op(const Tensor& x, Tensor& out, int64_t group_size, double scale) {
  check_dense(x, "x", out);
  check_dense(out, "out", x);
  Call call(x);
  hadamard(x.data_ptr(), out.data_ptr(), dtype_of(x.scalar_type()), x.numel(), int(group_size), float(scale),
           call.stream);
}

// In the order of ops.tiling.Tiling.cut.
TahTiling tiling_of(at::IntArrayRef cut, double threshold) {
  TORCH_CHECK(cut.size() == 12, "12 numbers describe a tiling, got ", cut.size());
  const auto at = [&](int i) { return uint32_t(cut[i]); };
  return {at(0), at(1), at(2),  at(3),  at(4),         at(5),         at(6),
          at(7), at(8), at(9),  int(at(10)), int(at(11)), float(threshold)};
}

// parts: the payload's sections in the order of TahPayload, stacked [ranks, n] when they are read.
TahPayload tah_payload(at::TensorList parts) {
  TORCH_CHECK(parts.size() == 7, "a payload has 7 sections, got ", parts.size());
  const auto at = [&](int i) { return static_cast<uint8_t*>(parts[i].data_ptr()); };
  check_aligned(at(0), "the payload");
  return {at(0), at(1), at(2), at(3), at(4), at(5), at(6)};
}

void tah_quant_encode_op(const Tensor& x, at::TensorList parts, at::IntArrayRef cut, double threshold) {
  check_dense(x, "x", x);
  for (const Tensor& part : parts) check_dense(part, "each section", x);
  Call call(x);
  const TahTiling tiling = tiling_of(cut, threshold);
  Tensor workspace = at::empty({tah_quant_encode_workspace(tiling)}, x.options().dtype(at::kByte));
  tah_quant_encode(x.data_ptr(), dtype_of(x.scalar_type()), tiling, tah_payload(parts),
                   workspace.data_ptr<uint8_t>(), call.stream);
}

void tah_quant_decode_op(at::TensorList parts, Tensor& out, at::IntArrayRef cut, double threshold) {
  check_dense(out, "out", out);
  for (const Tensor& part : parts) rows_of(part, "each section", out);
  Call call(out);
  const TahTiling tiling = tiling_of(cut, threshold);
  const TahPayload payload = tah_payload(parts);
  const int ranks = int(parts[3].size(0));
  const int64_t stride = parts[3].stride(0) * parts[3].element_size();
  TORCH_CHECK(ranks == 1 || stride % 16 == 0, "payloads must lie at multiples of 16 bytes, got ", stride);
  Tensor workspace = at::empty({tah_quant_decode_workspace(tiling, ranks)}, out.options().dtype(at::kByte));
  tah_quant_decode(payload, stride, ranks, out.data_ptr(), dtype_of(out.scalar_type()), tiling,
                   workspace.data_ptr<uint8_t>(), call.stream);
}

}  // namespace
}  // namespace megatron_compress

TORCH_LIBRARY_IMPL(megatron_compress, CUDA, m) {
  using namespace megatron_compress;
  m.impl("fp4_quant_encode", fp4_quant_encode_op);
  m.impl("fp4_quant_decode", fp4_quant_decode_op);
  m.impl("fp4_quant_requantize", fp4_quant_requantize_op);
  m.impl("fp8_encode", fp8_encode_op);
  m.impl("fp8_decode", fp8_decode_op);
  m.impl("fp8_requantize", fp8_requantize_op);
  m.impl("fixed_point_encode", grouped_encode);
  m.impl("fixed_point_decode", grouped_decode);
  m.impl("fixed_point_requantize", grouped_requantize);
  m.impl("fixed_point_channel_encode", channel_encode_op);
  m.impl("fixed_point_channel_decode", channel_decode_op);
  m.impl("tah_quant_encode", tah_quant_encode_op);
  m.impl("tah_quant_decode", tah_quant_decode_op);
  m.impl("hadamard", hadamard_op);
}
