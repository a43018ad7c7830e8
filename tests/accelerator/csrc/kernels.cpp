// The operations of the simulated accelerator: some of its own, and for every other one the CPU's kernel (calls.h).
#include "calls.h"
#include "device.h"
#include "memory.h"
#include "streams.h"

#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/native/Resize.h>
#include <c10/core/DeviceGuard.h>

namespace sim {
namespace {

c10::Device place_of(std::optional<c10::Device> device) {
  bool named = device.has_value() && device->has_index();
  return {kSim, named ? device->index() : current_device()};
}

Tensor empty(
    IntArrayRef size,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device> device,
    std::optional<bool> pin_memory,
    std::optional<at::MemoryFormat> memory_format) {
  TORCH_CHECK(!pin_memory.value_or(false), "Only dense CPU tensors can be pinned");
  c10::DeviceGuard guard(place_of(device));
  return at::detail::empty_generic(
      size, c10::GetAllocator(kSim), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype),
      memory_format);
}

Tensor empty_strided(
    IntArrayRef size,
    IntArrayRef stride,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device> device,
    std::optional<bool> pin_memory) {
  TORCH_CHECK(!pin_memory.value_or(false), "Only dense CPU tensors can be pinned");
  c10::DeviceGuard guard(place_of(device));
  return at::detail::empty_strided_generic(
      size, stride, c10::GetAllocator(kSim), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype));
}

const Tensor& resize_(const Tensor& self, IntArrayRef size, std::optional<at::MemoryFormat> format) {
  if (self.sizes() != size) {
    reshape(self, size, c10::contiguous_strides(size));
  }
  if (format.has_value() && *format != at::MemoryFormat::Preserve) {
    self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  }
  return self;
}

Tensor& set_storage(Tensor& self, at::Storage source, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  at::native::checkSetStorage(self, source, offset, size, stride);
  self.unsafeGetTensorImpl()->set_storage_offset(offset);
  reshape(self, size, stride.data() == nullptr ? IntArrayRef(c10::contiguous_strides(size)) : stride);
  return self;
}

Tensor& set_nothing(Tensor& self) {
  c10::DeviceGuard guard(self.device());
  at::Storage nothing(c10::Storage::use_byte_size_t(), 0, c10::GetAllocator(kSim), true);
  return set_storage(self, std::move(nothing), 0, {0}, {});
}

void record_stream(Tensor& self, c10::Stream stream) {
  record_on_stream(self.storage().data_ptr(), stream);
}

void copy_between_devices(const Tensor& source, const Tensor& target) {
  c10::Stream from = current_stream(source.get_device());
  c10::Stream to = current_stream(target.get_device());
  wait_in(from, now_in(to));
  Tensor source_view = kernel_view(source), target_view = kernel_view(target);
  enqueue_kernel(from, "copy on device", [source_view, target_view] { target_view.copy_(source_view); });
  wait_in(to, now_in(from));
}

// A CPU tensor over the same bytes that does not own them: else a stream's thread might be the last owner of an object
// of Python's.
Tensor host_view(const Tensor& host) {
  c10::DataPtr bytes(host.storage().mutable_data(), c10::Device(c10::DeviceType::CPU));
  size_t size = host.storage().nbytes();
  return kernel_view(host, c10::Storage(c10::Storage::use_byte_size_t(), size, std::move(bytes), nullptr, false));
}

// A copy from or to pinned memory returns at once if it may; every other one waits.
void copy_with_host(const Tensor& source, const Tensor& target, bool non_blocking) {
  bool to_host = target.is_cpu();
  std::string name = to_host ? "copy to host" : "copy from host";
  c10::Stream stream = current_stream((to_host ? source : target).get_device());
  Tensor source_view = to_host ? kernel_view(source) : host_view(source);
  Tensor target_view = to_host ? host_view(target) : kernel_view(target);
  auto pinned = keep_pinned((to_host ? target : source).data_ptr());
  bool waits = !non_blocking || pinned == nullptr;
  if (waits) {
    count_synchronization(name);
  }
  enqueue_kernel(stream, name, [source_view, target_view, pinned] { target_view.copy_(source_view); });
  if (waits) {
    wait_for(stream);
  }
}

Tensor copy_from(const Tensor& source, const Tensor& target, bool non_blocking) {
  if (target.numel() == 0) {
    return target;
  }
  if (source.is_cpu() || target.is_cpu()) {
    copy_with_host(source, target, non_blocking);
  } else {
    copy_between_devices(source, target);
  }
  return target;
}

at::Scalar read_scalar(const Tensor& self) {
  count_synchronization("item");
  wait_for(current_stream(self.get_device()));
  return at::native::_local_scalar_dense_cpu(kernel_view(self));
}

// What the device's memory holds at this moment, without waiting for any stream.
Tensor peek(const Tensor& tensor) {
  PlainCalls plain;
  return kernel_view(tensor).clone();
}

// torch composes the next operations in another way on accelerators than on the CPU. Here they are composed as on the
// CPU, for the sake of equal bits.

Tensor convolution(
    const Tensor& input,
    const Tensor& weight,
    const std::optional<Tensor>& bias,
    IntArrayRef stride,
    IntArrayRef padding,
    IntArrayRef dilation,
    bool transposed,
    IntArrayRef output_padding,
    int64_t groups) {
  return run_named(
             "aten::convolution",
             {input, weight, bias, stride, padding, dilation, transposed, output_padding, groups})
      .at(0)
      .toTensor();
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& gradient,
    const Tensor& input,
    const Tensor& weight,
    IntArrayRef stride,
    IntArrayRef padding,
    IntArrayRef dilation,
    bool transposed,
    IntArrayRef output_padding,
    int64_t groups,
    std::array<bool, 3> wanted) {
  std::vector<int64_t> bias_sizes{transposed ? weight.size(1) * groups : weight.size(0)};
  Stack results = run_named(
      "aten::convolution_backward",
      {gradient, input, weight, wanted[2] ? IValue(bias_sizes) : IValue(), stride, padding, dilation, transposed,
       output_padding, groups, c10::List<bool>({wanted[0], wanted[1], wanted[2]})});
  return {results.at(0).toTensor(), results.at(1).toTensor(), results.at(2).toTensor()};
}

Tensor dropout(const Tensor& input, double p, bool train) {
  TORCH_CHECK(p >= 0 && p <= 1, "dropout probability has to be between 0 and 1, but got ", p);
  if (p == 0 || !train || input.numel() == 0) {
    return input;
  }
  if (p == 1) {
    return input.mul(at::zeros({}, input.options()));
  }
  return input * at::empty_like(input).bernoulli_(1 - p).div_(1 - p);
}

// The kernel that torch would choose for CPU tensors of these shapes.
int64_t attention_kernel(
    const Tensor& query,
    const Tensor& key,
    const Tensor& value,
    const std::optional<Tensor>& mask,
    double dropout_p,
    bool is_causal,
    std::optional<double> scale,
    bool enable_gqa) {
  auto stand_in = [](const Tensor& tensor) {
    Tensor made = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
    return made.set_requires_grad(tensor.requires_grad());
  };
  bool masked = mask.has_value() && mask->defined();
  std::optional<Tensor> stand_in_mask = masked ? std::optional(stand_in(*mask)) : std::nullopt;
  return at::_fused_sdp_choice(
      stand_in(query), stand_in(key), stand_in(value), stand_in_mask, dropout_p, is_causal, scale, enable_gqa);
}

Tensor attention(
    const Tensor& query,
    const Tensor& key,
    const Tensor& value,
    const std::optional<Tensor>& given_mask,
    double dropout_p,
    bool is_causal,
    std::optional<double> scale,
    bool enable_gqa) {
  constexpr int64_t kFlash = 1;
  std::optional<Tensor> mask = given_mask;
  if (mask.has_value() && mask->defined() && mask->scalar_type() == at::kBool) {
    mask = at::where(*mask, at::scalar_tensor(0.0, query.options()), at::scalar_tensor(-INFINITY, query.options()));
  }
  if (attention_kernel(query, key, value, mask, dropout_p, is_causal, scale, enable_gqa) == kFlash) {
    return std::get<0>(
        at::_scaled_dot_product_flash_attention_for_cpu(query, key, value, dropout_p, is_causal, mask, scale));
  }
  return std::get<0>(at::_scaled_dot_product_attention_math(
      query, key, value, mask, dropout_p, is_causal, std::nullopt, scale, enable_gqa));
}

// Call an operation with all floating tensors in one type, as torch's own autocasting does.
void call_in(const OperatorHandle& operation, Stack* stack, at::ScalarType dtype) {
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKeySet(c10::DispatchKey::AutocastPrivateUse1));
  size_t count = operation.schema().arguments().size();
  for (size_t i = stack->size() - count; i < stack->size(); ++i) {
    (*stack)[i] = with_tensors((*stack)[i], [&](const Tensor& tensor) {
      return tensor.defined() ? at::autocast::cached_cast(dtype, tensor, kSim) : tensor;
    });
  }
  operation.callBoxed(stack);
}

void call_in_lower_precision(const OperatorHandle& operation, Stack* stack) {
  call_in(operation, stack, at::autocast::get_autocast_dtype(kSim));
}

void call_in_float(const OperatorHandle& operation, Stack* stack) {
  call_in(operation, stack, at::kFloat);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_boxed>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("resize_", &resize_);
  library.impl("set_", &set_nothing);
  library.impl("set_.source_Tensor", &at::native::set_tensor_);
  library.impl("set_.source_Storage", static_cast<Tensor& (*)(Tensor&, at::Storage)>(&at::native::set_));
  library.impl("set_.source_Storage_storage_offset", &set_storage);
  library.impl("as_strided", &at::native::as_strided_tensorimpl);
  library.impl("view", &at::native::view);
  library.impl("_reshape_alias", &at::native::_reshape_alias);
  library.impl("unfold", &at::native::unfold);
  library.impl("view_as_real", &at::native::view_as_real);
  library.impl("view_as_complex", &at::native::view_as_complex);
  library.impl("_copy_from", &copy_from);
  library.impl("_local_scalar_dense", &read_scalar);
  library.impl("record_stream", &record_stream);
  library.impl("convolution_overrideable", &convolution);
  library.impl("convolution_backward_overrideable", &convolution_backward);
  library.impl("dropout", &dropout);
  library.impl("scaled_dot_product_attention", &attention);
  // torch composes these from other operations where a backend has no kernel; the CPU has one.
  for (const char* name : {"native_layer_norm", "native_group_norm", "silu_backward", "mish_backward", "addr"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_boxed>());
  }
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, library) {
  library.impl("dropout", &dropout);
  library.impl("scaled_dot_product_attention", &attention);
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, library) {
  for (const char* name :
       {"conv1d", "conv1d.padding", "conv2d", "conv2d.padding", "conv3d", "conv3d.padding", "conv_tbc",
        "conv_transpose1d", "conv_transpose2d.input", "conv_transpose3d.input", "mm", "bmm", "addmm", "addbmm",
        "baddbmm", "matmul", "linear", "linalg_vecdot", "prelu", "scaled_dot_product_attention"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&call_in_lower_precision>());
  }
  for (const char* name :
       {"cross_entropy_loss", "nll_loss", "nll_loss2d", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div",
        "binary_cross_entropy", "binary_cross_entropy_with_logits", "prod", "prod.dim_int", "cdist"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&call_in_float>());
  }
}

TORCH_LIBRARY_FRAGMENT(sim, library) {
  library.def("peek(Tensor tensor) -> Tensor", &peek);
}

} // namespace
} // namespace sim
