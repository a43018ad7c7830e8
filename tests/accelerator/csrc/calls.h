// Calls of operations: torch's CPU kernel runs on the device's memory, in the stream's thread, after the call returned.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/Stream.h>

#include <functional>
#include <string>

namespace sim {

using at::IntArrayRef;
using at::IValue;
using at::Tensor;
using c10::OperatorHandle;
using torch::jit::Stack;

// Run a call of an operation on tensors of the device: take its arguments from the stack and leave its results there.
void run_boxed(const OperatorHandle& operation, Stack* stack);

// The same for an operation by its name, without overload.
Stack run_named(const char* name, const Stack& arguments);

// CPU kernels only: no gradients, no autocasting, nothing that a caller's thread has switched on.
struct PlainCalls {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
};

// A CPU tensor over the memory of a device tensor, or over a storage. Only a kernel or a copy may use it.
Tensor kernel_view(const Tensor& tensor);
Tensor kernel_view(const Tensor& tensor, const c10::Storage& storage);

// Append work to a stream that uses CPU kernels.
void enqueue_kernel(c10::Stream stream, const std::string& name, std::function<void()> work);

// Give a device tensor other sizes and strides, and its storage the room for them.
void reshape(const Tensor& tensor, IntArrayRef sizes, IntArrayRef strides);

template <typename F>
void for_each_tensor(const IValue& value, F visit) {
  if (value.isTensor()) {
    visit(value.toTensor());
  } else if (value.isTensorList()) {
    for (const Tensor& tensor : value.toTensorVector()) {
      visit(tensor);
    }
  } else if (value.isOptionalTensorList()) {
    for (const auto& tensor : value.toOptionalTensorVector()) {
      visit(tensor.value_or(Tensor()));
    }
  }
}

template <typename F>
IValue with_tensors(const IValue& value, F replace) {
  if (value.isTensor()) {
    return replace(value.toTensor());
  }
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& tensor : value.toTensorVector()) {
      list.push_back(replace(tensor));
    }
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const auto& tensor : value.toOptionalTensorVector()) {
      list.push_back(tensor.has_value() && tensor->defined() ? std::optional(replace(*tensor)) : std::nullopt);
    }
    return list;
  }
  return value;
}

} // namespace sim
