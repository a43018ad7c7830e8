#include "calls.h"

#include "device.h"
#include "memory.h"
#include "streams.h"

#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/DeviceGuard.h>

#include <mutex>
#include <set>
#include <unordered_map>

namespace sim {
namespace {

Tensor snapshot(const Tensor& host) {
  PlainCalls plain;
  Tensor copy = host.detach().clone();
  if (host.unsafeGetTensorImpl()->is_wrapped_number()) {
    copy.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  return copy;
}

// CPU kernels split their sums by the number of threads, so a stream uses as many as its caller.
void use_threads(int count) {
  if (at::get_num_threads() != count) {
    at::set_num_threads(count);
  }
}

c10::Storage kernel_storage(const Tensor& tensor) {
  const c10::Storage& storage = tensor.storage();
  c10::DataPtr memory(kernel_address(storage.data()), c10::Device(c10::DeviceType::CPU));
  return c10::Storage(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(memory), nullptr, false);
}

bool is_written(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

// One call of an operation: its arguments and the distinct tensors among them.
struct Call {
  const OperatorHandle& operation;
  std::vector<IValue> arguments;
  std::vector<Tensor> tensors; // distinct, in order of appearance
  c10::DeviceIndex device = -1;

  Call(const OperatorHandle& op, const Stack& stack) : operation(op) {
    size_t count = op.schema().arguments().size();
    arguments.assign(stack.end() - static_cast<long>(count), stack.end());
    for (const IValue& argument : arguments) {
      for_each_tensor(argument, [&](const Tensor& tensor) {
        if (tensor.defined() && position(tensor) == tensors.size()) {
          tensors.push_back(tensor);
        }
        if (tensor.defined() && tensor.device().type() == kSim && device < 0) {
          device = tensor.get_device();
        }
      });
    }
    TORCH_CHECK_NOT_IMPLEMENTED(device >= 0, name(), " has no implementation for the simulated accelerator");
    require_one_device();
  }

  std::string name() const {
    return c10::toString(operation.operator_name());
  }

  c10::Stream stream() const {
    return current_stream(device);
  }

  size_t position(const Tensor& tensor) const {
    size_t at = 0;
    while (at < tensors.size() && !tensors[at].is_same(tensor)) {
      ++at;
    }
    return at;
  }

  // The call with each tensor replaced by the one at the same place in `others`.
  Stack with(const std::vector<Tensor>& others) const {
    Stack stack;
    for (const IValue& argument : arguments) {
      if (argument.isDevice()) {
        stack.emplace_back(c10::Device(c10::DeviceType::CPU));
      } else {
        stack.push_back(with_tensors(argument, [&](const Tensor& tensor) {
          return tensor.defined() ? others[position(tensor)] : tensor;
        }));
      }
    }
    return stack;
  }

  bool has_generator() const {
    for (const auto& argument : operation.schema().arguments()) {
      if (argument.type()->str().find("Generator") != std::string::npos) {
        return true;
      }
    }
    return false;
  }

  bool reads_tensors() const {
    bool reads = false;
    for (size_t i = 0; i < arguments.size(); ++i) {
      if (!is_written(operation.schema().arguments()[i])) {
        for_each_tensor(arguments[i], [&](const Tensor& tensor) { reads |= tensor.defined(); });
      }
    }
    return reads;
  }

  void use_generator(Stack& stack) const {
    for (size_t i = 0; i < arguments.size(); ++i) {
      if (operation.schema().arguments()[i].type()->str().find("Generator") != std::string::npos) {
        stack[i] = drawing_generator(arguments[i].toOptional<at::Generator>(), device);
      }
    }
  }

 private:
  // As on other accelerators: all tensors on one device, save numbers of the host that are only read. Indices may come
  // from the host too, which costs a synchronization.
  void require_one_device() const {
    bool indexing = operation.schema().name().find("index") != std::string::npos;
    for (size_t i = 0; i < arguments.size(); ++i) {
      bool written = is_written(operation.schema().arguments()[i]);
      for_each_tensor(arguments[i], [&](const Tensor& tensor) {
        if (!tensor.defined() || tensor.device() == c10::Device(kSim, device)) {
          return;
        }
        bool number = tensor.is_cpu() && tensor.dim() == 0 && !written;
        bool index = indexing && tensor.is_cpu() && arguments[i].isOptionalTensorList();
        TORCH_CHECK(
            number || index, "Expected all tensors to be on the same device, but found at least two devices, sim:",
            int(device), " and ", tensor.device(), "! (in ", name(), ")");
        if (index && !number) {
          count_synchronization("index from host");
        }
      });
    }
  }
};

struct Geometry {
  std::vector<int64_t> sizes, strides;
  explicit Geometry(const Tensor& tensor) : sizes(tensor.sizes().vec()), strides(tensor.strides().vec()) {}
  bool operator==(const Geometry& other) const {
    return sizes == other.sizes && strides == other.strides;
  }
};

// Where a tensor of an operation's result lies.
struct Output {
  enum Kind { UNDEFINED, FRESH, ARGUMENT, VIEW } kind = UNDEFINED;
  size_t argument = 0;
  std::optional<Geometry> geometry = std::nullopt;
  int64_t offset = 0;
  at::ScalarType dtype = at::kFloat;
};

// What a call does to shapes: its outputs, and the arguments that it reshapes.
struct Outcome {
  std::vector<std::vector<Output>> outputs; // for each value that the operation returns
  std::vector<bool> is_list;
  std::vector<std::pair<size_t, Geometry>> reshaped;
};

Output describe_output(const Tensor& result, const std::vector<Tensor>& stand_ins) {
  if (!result.defined()) {
    return {Output::UNDEFINED};
  }
  for (size_t i = 0; i < stand_ins.size(); ++i) {
    if (result.is_same(stand_ins[i])) {
      return {Output::ARGUMENT, i};
    }
  }
  for (size_t i = 0; i < stand_ins.size(); ++i) {
    if (result.storage().is_alias_of(stand_ins[i].storage())) {
      TORCH_CHECK_NOT_IMPLEMENTED(
          result.dtype() == stand_ins[i].dtype(), "the simulated accelerator has no views of another type");
      int64_t offset = result.storage_offset() - stand_ins[i].storage_offset();
      return {Output::VIEW, i, Geometry(result), offset, result.scalar_type()};
    }
  }
  return {Output::FRESH, 0, Geometry(result), 0, result.scalar_type()};
}

bool returns_only_tensors(const c10::FunctionSchema& schema) {
  for (const auto& returned : schema.returns()) {
    const auto& kind = *returned.type();
    bool list = kind.kind() == c10::TypeKind::ListType && kind.containedType(0)->kind() == c10::TypeKind::TensorType;
    if (kind.kind() != c10::TypeKind::TensorType && !list) {
      return false;
    }
  }
  return true;
}

std::vector<Geometry> geometries(const std::vector<Tensor>& tensors) {
  std::vector<Geometry> found;
  for (const Tensor& tensor : tensors) {
    found.emplace_back(tensor);
  }
  return found;
}

Outcome describe(const Stack& results, const std::vector<Tensor>& stand_ins, const std::vector<Geometry>& before) {
  Outcome outcome;
  for (const IValue& result : results) {
    outcome.is_list.push_back(result.isTensorList());
    auto& outputs = outcome.outputs.emplace_back();
    for_each_tensor(result, [&](const Tensor& tensor) { outputs.push_back(describe_output(tensor, stand_ins)); });
  }
  for (size_t i = 0; i < stand_ins.size(); ++i) {
    if (Geometry now(stand_ins[i]); !(now == before[i])) {
      outcome.reshaped.emplace_back(i, now);
    }
  }
  return outcome;
}

// Make the results of a call: new tensors of the device, views, or arguments. `fresh` gets the new ones in order.
Stack make_results(const Call& call, const Outcome& outcome, std::vector<Tensor>& fresh) {
  auto make = [&](const Output& output) -> Tensor {
    switch (output.kind) {
      case Output::ARGUMENT:
        return call.tensors[output.argument];
      case Output::VIEW: {
        const Tensor& base = call.tensors[output.argument];
        return at::native::as_strided_tensorimpl(
            base, output.geometry->sizes, output.geometry->strides, base.storage_offset() + output.offset);
      }
      case Output::FRESH:
        fresh.push_back(at::empty_strided(
            output.geometry->sizes, output.geometry->strides,
            at::TensorOptions().dtype(output.dtype).device(c10::Device(kSim, call.device))));
        return fresh.back();
      default:
        return Tensor();
    }
  };
  Stack results;
  for (size_t i = 0; i < outcome.outputs.size(); ++i) {
    c10::List<Tensor> made;
    for (const Output& output : outcome.outputs[i]) {
      made.push_back(make(output));
    }
    results.push_back(outcome.is_list[i] ? IValue(made) : IValue(Tensor(made.get(0))));
  }
  return results;
}

// Copy the new tensors of a CPU kernel's result to where the call has said that they will be.
void publish(const Stack& results, const Outcome& outcome, const std::vector<Tensor>& targets) {
  size_t next = 0;
  for (size_t i = 0; i < results.size(); ++i) {
    size_t within = 0;
    for_each_tensor(results[i], [&](const Tensor& result) {
      if (outcome.outputs[i].at(within++).kind != Output::FRESH) {
        return;
      }
      const Tensor& target = targets.at(next++);
      TORCH_CHECK(
          result.sizes() == target.sizes() && result.dtype() == target.dtype(), "its result is ", result.sizes(),
          ", but zeros of the same shapes gave ", target.sizes());
      target.copy_(result);
    });
  }
}

std::vector<Tensor> kernel_views(const std::vector<Tensor>& tensors) {
  std::vector<Tensor> views;
  std::vector<c10::Storage> storages; // tensors that share memory share it in the kernel too
  for (size_t i = 0; i < tensors.size(); ++i) {
    const Tensor& tensor = tensors[i];
    if (tensor.is_cpu()) {
      storages.emplace_back();
      views.push_back(snapshot(tensor));
      continue;
    }
    size_t first = 0;
    while (first < i && !tensors[first].storage().is_alias_of(tensor.storage())) {
      ++first;
    }
    storages.push_back(first < i ? storages[first] : kernel_storage(tensor));
    views.push_back(kernel_view(tensor, storages.back()));
  }
  return views;
}

// Zeros of the shapes of a call's tensors.
std::vector<Tensor> zeros_like(const Call& call) {
  std::vector<Tensor> zeros;
  for (const Tensor& tensor : call.tensors) {
    if (tensor.is_cpu()) {
      zeros.push_back(snapshot(tensor));
    } else {
      zeros.push_back(at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU)));
      std::memset(zeros.back().storage().mutable_data(), 0, zeros.back().storage().nbytes());
    }
  }
  return zeros;
}

void append(std::string& key, IntArrayRef values) {
  key.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(int64_t));
  key.push_back('|');
}

bool append(std::string& key, const Call& call, const IValue& value, bool with_floats) {
  bool known = true;
  if (value.isTensor() || value.isTensorList() || value.isOptionalTensorList()) {
    for_each_tensor(value, [&](const Tensor& tensor) {
      if (!tensor.defined()) {
        key.append("U");
        return;
      }
      int64_t traits[] = {
          int64_t(call.position(tensor)), int64_t(tensor.scalar_type()), tensor.is_cpu(),
          tensor.unsafeGetTensorImpl()->is_wrapped_number(), tensor.dim()};
      append(key, traits);
      append(key, tensor.sizes());
      append(key, tensor.strides());
    });
  } else if (value.isInt() || value.isBool()) {
    append(key, {value.isInt() ? value.toInt() : int64_t(value.toBool())});
  } else if (value.isIntList()) {
    append(key, value.toIntVector());
  } else if (value.isBoolList()) {
    for (bool flag : value.toBoolList()) {
      key.push_back(flag ? '1' : '0');
    }
  } else if (value.isDouble()) {
    key.append(with_floats ? std::to_string(value.toDouble()) : "F");
  } else if (value.isString()) {
    key.append(value.toStringRef());
  } else {
    known = value.isNone() || value.isDevice();
  }
  key.push_back(';');
  return known;
}

// Calls with equal keys have equal outcomes; no key where that is not known. Only ranges have shapes that depend on
// floating numbers; elsewhere these are left out, for a learning rate that changes would make every call a new one.
std::optional<std::string> key_of(const Call& call) {
  std::string key = call.name();
  bool with_floats = key.find("range") != std::string::npos || key.find("upsample") != std::string::npos;
  append(key, {int64_t(at::get_default_dtype_as_scalartype())});
  for (const IValue& argument : call.arguments) {
    if (!append(key, call, argument, with_floats)) {
      return std::nullopt;
    }
  }
  return key;
}

// What a call will do to shapes, learned from a run of the CPU kernel on zeros. Nothing where zeros are no valid input.
std::optional<Outcome> rehearse(const Call& call) {
  PlainCalls plain;
  std::vector<Tensor> zeros = zeros_like(call);
  std::vector<Geometry> before = geometries(zeros);
  Stack stack = call.with(zeros);
  try {
    call.operation.callBoxed(&stack);
  } catch (const std::exception&) {
    return std::nullopt;
  }
  return describe(stack, zeros, before);
}

std::optional<Outcome> outcome_of(const Call& call) {
  static std::mutex mutex;
  static auto* known = new std::unordered_map<std::string, Outcome>();
  auto key = key_of(call);
  if (key.has_value()) {
    std::lock_guard lock(mutex);
    if (auto found = known->find(*key); found != known->end()) {
      return found->second;
    }
  }
  auto outcome = rehearse(call);
  if (key.has_value() && outcome.has_value()) {
    std::lock_guard lock(mutex);
    if (known->size() > 20000) {
      known->clear();
    }
    known->emplace(*key, *outcome);
  }
  return outcome;
}

// The usual case: the shapes are known at once, the numbers come later.
Stack run_later(const Call& call, const Outcome& outcome) {
  for (const auto& [argument, geometry] : outcome.reshaped) {
    reshape(call.tensors[argument], geometry.sizes, geometry.strides);
  }
  std::vector<Tensor> fresh;
  Stack results = make_results(call, outcome, fresh);
  Stack stack = call.with(kernel_views(call.tensors));
  enqueue_kernel(
      call.stream(), call.name(),
      [operation = call.operation, stack = std::move(stack), outcome, targets = kernel_views(fresh)]() mutable {
        operation.callBoxed(&stack);
        publish(stack, outcome, targets);
      });
  return results;
}

Stack publish_later(
    const Call& call, Stack results, const std::vector<Tensor>& stand_ins, const std::vector<Geometry>& before) {
  Outcome outcome = describe(results, stand_ins, before);
  std::vector<Tensor> fresh;
  Stack made = make_results(call, outcome, fresh);
  enqueue_kernel(
      call.stream(), call.name(),
      [results = std::move(results), outcome, targets = kernel_views(fresh)] { publish(results, outcome, targets); });
  return made;
}

// Results that depend on numbers of the device in more than their values: wait for the stream, then run the kernel.
Stack run_now(const Call& call) {
  wait_for(call.stream());
  std::vector<Tensor> views = kernel_views(call.tensors);
  std::vector<Geometry> before = geometries(views);
  Stack stack = call.with(views);
  call.use_generator(stack);
  PlainCalls plain;
  call.operation.callBoxed(&stack);
  return returns_only_tensors(call.operation.schema()) ? publish_later(call, std::move(stack), views, before) : stack;
}

// Random numbers that depend on no tensor are drawn at once, by the device's generator, and arrive later.
Stack draw(const Call& call) {
  PlainCalls plain;
  std::vector<Tensor> drawn = zeros_like(call);
  std::vector<Geometry> before = geometries(drawn);
  Stack stack = call.with(drawn);
  call.use_generator(stack);
  call.operation.callBoxed(&stack);
  Outcome outcome = describe(stack, drawn, before);
  for (const auto& [argument, geometry] : outcome.reshaped) {
    reshape(call.tensors[argument], geometry.sizes, geometry.strides);
  }
  std::vector<Tensor> fresh;
  Stack results = make_results(call, outcome, fresh);
  TORCH_CHECK_NOT_IMPLEMENTED(fresh.empty(), call.name(), " has no implementation for the simulated accelerator");
  enqueue_kernel(call.stream(), call.name(), [drawn, targets = kernel_views(call.tensors)] {
    for (size_t i = 0; i < drawn.size(); ++i) {
      targets[i].copy_(drawn[i]);
    }
  });
  return results;
}

// `index` with a mask has asked for the mask's `nonzero` before, so its result's shape is known and nothing is counted.
bool is_masked_index(const Call& call) {
  bool masked = false;
  if (call.operation.schema().name() == "aten::index") {
    for_each_tensor(call.arguments[1], [&](const Tensor& index) {
      masked |= index.defined() && (index.scalar_type() == at::kBool || index.scalar_type() == at::kByte);
    });
  }
  return masked;
}

bool depends_on_values(const Call& call) {
  const OperatorHandle& operation = call.operation;
  return operation.hasTag(at::Tag::data_dependent_output) || !returns_only_tensors(operation.schema()) ||
      (operation.hasTag(at::Tag::dynamic_output_shape) && operation.schema().name() != "aten::index");
}

// These draw numbers without saying from which generator, so the CPU's would be used. They are refused.
void require_own_generator(const Call& call) {
  static const std::set<std::string> draw_nothing{"aten::_scaled_dot_product_flash_attention_for_cpu"};
  TORCH_CHECK_NOT_IMPLEMENTED(
      !call.operation.hasTag(at::Tag::nondeterministic_seeded) || draw_nothing.count(call.name()) > 0, call.name(),
      " draws from an unnamed generator: it has no implementation for the simulated accelerator");
}

Stack run(const Call& call) {
  c10::DeviceGuard guard(c10::Device(kSim, call.device));
  if (call.has_generator()) {
    return call.reads_tensors() ? run_now(call) : draw(call);
  }
  require_own_generator(call);
  if (is_masked_index(call)) {
    return run_now(call);
  }
  if (depends_on_values(call)) {
    count_synchronization(call.name());
    return run_now(call);
  }
  auto outcome = outcome_of(call);
  return outcome.has_value() ? run_later(call, *outcome) : run_now(call);
}

} // namespace

Tensor kernel_view(const Tensor& tensor, const c10::Storage& storage) {
  auto view = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  auto* impl = view.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    impl->set_wrapped_number(true);
  }
  return view;
}

Tensor kernel_view(const Tensor& tensor) {
  return kernel_view(tensor, kernel_storage(tensor));
}

void enqueue_kernel(c10::Stream stream, const std::string& name, std::function<void()> work) {
  int threads = at::get_num_threads();
  enqueue(stream, name, [threads, work = std::move(work)] {
    use_threads(threads);
    PlainCalls plain;
    work();
  });
}

void reshape(const Tensor& tensor, IntArrayRef sizes, IntArrayRef strides) {
  size_t bytes = at::detail::computeStorageNbytes(sizes, strides, tensor.itemsize(), tensor.storage_offset());
  if (bytes > tensor.storage().nbytes()) {
    resize_storage(tensor.storage(), bytes);
  }
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
}

void run_boxed(const OperatorHandle& operation, Stack* stack) {
  Stack results = run(Call(operation, *stack));
  torch::jit::drop(*stack, operation.schema().arguments().size());
  stack->insert(stack->end(), results.begin(), results.end());
}

Stack run_named(const char* name, const Stack& arguments) {
  return run(Call(c10::Dispatcher::singleton().findSchemaOrThrow(name, ""), arguments));
}

} // namespace sim
