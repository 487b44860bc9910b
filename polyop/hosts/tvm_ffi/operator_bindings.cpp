#include "polyop/hosts/tvm_ffi/operator_bindings.h"

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/reflection/registry.h>
#include <tvm/ffi/string.h>

#include <array>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <string>
#include <vector>

#include "polyop/core/call.h"
#include "polyop/cpu/thread_pool.h"
#include "polyop/hosts/tvm_ffi/cuda_calls.h"
#include "polyop/hosts/tvm_ffi/error_translation.h"
#include "polyop/ops/operators.h"

namespace polyop::tvm_ffi_host {
namespace {

namespace ffi = ::tvm::ffi;

std::string argument_name(const OpSchema& schema, size_t index) {
  const size_t num_operands = schema.operands().size();
  return schema.name() + ": " +
         (index < num_operands ? schema.operands()[index].name
                               : "attribute " + schema.attributes()[index - num_operands].name);
}

Status to_dtype(DLDataType dtype, DType* result) {
  const auto is = [&](int code, int bits) { return dtype.code == code && dtype.bits == bits && dtype.lanes == 1; };
  if (is(kDLFloat, 32))
    *result = DType::kF32;
  else if (is(kDLFloat, 16))
    *result = DType::kF16;
  else if (is(kDLBfloat, 16))
    *result = DType::kBF16;
  else if (is(kDLFloat8_e4m3fn, 8))
    *result = DType::kF8E4M3;
  else if (is(kDLInt, 64))
    *result = DType::kI64;
  else if (is(kDLInt, 32))
    *result = DType::kI32;
  else if (is(kDLInt, 8))
    *result = DType::kI8;
  else if (is(kDLUInt, 8))
    *result = DType::kU8;
  else if (is(kDLBool, 8))
    *result = DType::kBool;
  else
    return invalid_argument("has a dtype that polyop does not know (DLPack code " + std::to_string(dtype.code) + ", " +
                            std::to_string(dtype.bits) + " bits)");
  return Status::ok();
}

Status to_tensor_view(const DLTensor& tensor, TensorView* view) {
  if (tensor.ndim > kMaxRank) {
    return invalid_argument("has rank " + std::to_string(tensor.ndim) + ", wanted at most " + std::to_string(kMaxRank));
  }
  POLYOP_RETURN_IF_ERROR(to_dtype(tensor.dtype, &view->dtype));
  switch (tensor.device.device_type) {
    case kDLCPU:
    case kDLCUDAHost:
      view->device = {DeviceType::kCpu, 0};
      break;
    case kDLCUDA:
      view->device = {DeviceType::kCuda, tensor.device.device_id};
      break;
    default:
      return invalid_argument("is on a device that polyop does not know (DLPack device type " +
                              std::to_string(static_cast<int>(tensor.device.device_type)) + ")");
  }
  if (tensor.strides == nullptr) {  // DLPack before 1.2: dense row-major
    *view = TensorView::contiguous(nullptr, view->dtype, tensor.shape, tensor.ndim, view->device);
  } else {
    view->rank = tensor.ndim;
    for (int axis = 0; axis < tensor.ndim; ++axis) {
      view->shape[axis] = tensor.shape[axis];
      view->strides[axis] = tensor.strides[axis];
    }
  }
  view->data = tensor.data == nullptr ? nullptr : static_cast<char*>(tensor.data) + tensor.byte_offset;
  return Status::ok();
}

/// Lists that an attribute borrows for the length of one call.
struct ListStorage {
  std::vector<int64_t> integers;
  std::vector<double> reals;
  std::string text;
};

Status to_attribute(ffi::AnyView argument, AttributeKind kind, std::optional<ListStorage>* storage,
                    AttributeValue* value) {
  switch (argument.type_index()) {
    case ffi::TypeIndex::kTVMFFINone:
      return Status::ok();
    case ffi::TypeIndex::kTVMFFIBool:
      *value = AttributeValue::of_bool(argument.cast<bool>());
      return Status::ok();
    case ffi::TypeIndex::kTVMFFIInt:
      *value = AttributeValue::of_int(argument.cast<int64_t>());
      return Status::ok();
    case ffi::TypeIndex::kTVMFFIFloat:
      *value = AttributeValue::of_float(argument.cast<double>());
      return Status::ok();
    default:
      break;
  }
  if (auto text = argument.try_cast<ffi::String>()) {
    storage->emplace().text.assign(text->data(), text->size());
    *value = AttributeValue::of_text((*storage)->text);
    return Status::ok();
  }
  if (kind == AttributeKind::kIntList) {
    if (auto list = argument.try_cast<ffi::Array<int64_t>>()) {
      storage->emplace().integers.assign(list->begin(), list->end());
      *value = AttributeValue::of_ints((*storage)->integers);
      return Status::ok();
    }
  }
  if (kind == AttributeKind::kFloatList) {
    if (auto list = argument.try_cast<ffi::Array<double>>()) {
      storage->emplace().reals.assign(list->begin(), list->end());
      *value = AttributeValue::of_floats((*storage)->reals);
      return Status::ok();
    }
  }
  return invalid_argument("has the wrong kind of value (" + argument.GetTypeKey() + ")");
}

[[noreturn]] void fail_argument(const OpSchema& schema, size_t index, const Status& status) {
  throw_if_error({status.code(), argument_name(schema, index) + " " + status.message()});
  __builtin_unreachable();
}

/// Arguments of one call as core wants them; lives as long as the call. Optionals keep what a call does not use
/// unwritten: clearing it all would cost more than binding the call.
struct CallArguments {
  std::array<std::optional<TensorView>, kMaxOperands> views;
  std::array<const TensorView*, kMaxOperands> operands{};
  std::array<AttributeValue, kMaxAttributes> attributes{};
  std::array<std::optional<ListStorage>, kMaxAttributes> lists;

  /// Reads operands in schema order (None where absent; outputs are left out when !with_outputs), then attributes in
  /// schema order (None: the default).
  void read(const OpSchema& schema, ffi::PackedArgs args, bool with_outputs) {
    int next = 0;
    for (size_t i = 0; i < schema.operands().size(); ++i) {
      if (!with_outputs && schema.operands()[i].role == OperandRole::kOutput) continue;
      if (next >= args.size()) fail_count(schema, args.size());
      const ffi::AnyView argument = args[next++];
      if (argument.type_index() == ffi::TypeIndex::kTVMFFINone) continue;
      const auto tensor = argument.try_cast<DLTensor*>();
      const Status status = tensor ? to_tensor_view(**tensor, &views[i].emplace()) : invalid_argument("is no tensor");
      if (!status.is_ok()) fail_argument(schema, i, status);
      operands[i] = &*views[i];
    }
    const size_t num_attributes = schema.attributes().size();
    if (args.size() - next != static_cast<int>(num_attributes)) fail_count(schema, args.size());
    for (size_t i = 0; i < num_attributes; ++i) {
      const Status status = to_attribute(args[next++], schema.attributes()[i].kind, &lists[i], &attributes[i]);
      if (!status.is_ok()) fail_argument(schema, schema.operands().size() + i, status);
    }
  }

  [[nodiscard]] std::span<const TensorView* const> operand_span(const OpSchema& schema) const {
    return std::span(operands).first(schema.operands().size());
  }
  [[nodiscard]] std::span<const AttributeValue> attribute_span(const OpSchema& schema) const {
    return std::span<const AttributeValue>(attributes).first(schema.attributes().size());
  }

 private:
  static void fail_count(const OpSchema& schema, int count) {
    throw_if_error(invalid_argument(schema.name() + ": got " + std::to_string(count) +
                                    " arguments; the schema's operands and attributes are wanted, one each"));
  }
};

/// Held shared by CPU calls, exclusively by set_num_threads: a kernel cuts its scratch for the number of threads.
std::shared_mutex& num_threads_mutex() {
  static std::shared_mutex mutex;
  return mutex;
}

Stream current_stream(Device device) {
  if (device.type == DeviceType::kCpu) return {};
  return {TVMFFIEnvGetStream(kDLCUDA, device.index)};
}

/// Runs an operator, or only its kernel of that name. CPU kernels have finished on return; CUDA work is queued in the
/// caller's current stream.
void call_packed(const Operator& op, ffi::PackedArgs args, std::string_view kernel = {}) {
  const OpSchema& schema = op.schema();
  CallArguments arguments;
  arguments.read(schema, args, /*with_outputs=*/true);
  BoundCall call;
  throw_if_error(bind_call(schema, arguments.operand_span(schema), arguments.attribute_span(schema), &call));
  const Stream stream = current_stream(call.device);
  if (call.device.type == DeviceType::kCuda) {
    throw_if_error(run_on_cuda(op, call, stream, kernel));
  } else {
    const std::shared_lock lock(num_threads_mutex());
    throw_if_error(op.run(call, HostWorkspaces::of_this_thread(), stream, kernel));
  }
}

/// Checks inputs and attributes against the schema and runs nothing.
void check_packed(const Operator& op, ffi::PackedArgs args) {
  const OpSchema& schema = op.schema();
  CallArguments arguments;
  arguments.read(schema, args, /*with_outputs=*/false);
  std::array<OutputShape, kMaxOperands> outputs;
  throw_if_error(infer_outputs(schema, arguments.operand_span(schema), arguments.attribute_span(schema), outputs));
}

/// One operand of a node: None, a tensor whose values the graph knows, or [dtype, shape] with -1 for an unknown extent
/// and None for an unknown shape.
Status to_graph_view(ffi::AnyView argument, TensorView* view) {
  if (const auto tensor = argument.try_cast<DLTensor*>()) return to_tensor_view(**tensor, view);
  const auto pair = argument.try_cast<ffi::Array<ffi::Any>>();
  if (!pair || pair->size() != 2) return invalid_argument("is no tensor and no [dtype, shape]");
  const auto name = (*pair)[0].try_cast<ffi::String>();
  const auto dtype = name ? dtype_from_name(std::string_view(name->data(), name->size())) : std::nullopt;
  if (!dtype)
    return invalid_argument("has a dtype that polyop does not know" + (name ? " (" + std::string(*name) + ")" : ""));
  view->dtype = *dtype;
  view->rank = kUnknownRank;
  const auto shape = (*pair)[1].try_cast<ffi::Array<int64_t>>();
  if (!shape) return Status::ok();
  if (shape->size() > kMaxRank) {
    return invalid_argument("has rank " + std::to_string(shape->size()) + ", wanted at most " +
                            std::to_string(kMaxRank));
  }
  view->rank = static_cast<int32_t>(shape->size());
  std::copy(shape->begin(), shape->end(), view->shape.begin());
  return Status::ok();
}

/// Checks one node of a graph before it runs and names the kernel that would run it: the device ("cpu" or "cuda"), then
/// inputs as to_graph_view takes them, then attributes.
ffi::String check_node(const Operator& op, ffi::PackedArgs args) {
  const OpSchema& schema = op.schema();
  std::array<TensorView, kMaxOperands> views;
  std::array<const TensorView*, kMaxOperands> operands{};
  std::array<AttributeValue, kMaxAttributes> attributes{};
  std::array<std::optional<ListStorage>, kMaxAttributes> lists;
  size_t inputs = 0;
  for (const OperandSchema& operand : schema.operands()) inputs += operand.role == OperandRole::kOutput ? 0 : 1;
  if (static_cast<size_t>(args.size()) != 1 + inputs + schema.attributes().size()) {
    throw_if_error(invalid_argument(schema.name() + ": wanted a device, its inputs and its attributes"));
  }
  const bool on_cuda = args[0].cast<ffi::String>() == "cuda";
  int next = 1;
  for (size_t i = 0; i < schema.operands().size(); ++i) {
    if (schema.operands()[i].role == OperandRole::kOutput) continue;
    const ffi::AnyView argument = args[next++];
    if (argument.type_index() == ffi::TypeIndex::kTVMFFINone) continue;
    if (const Status status = to_graph_view(argument, &views[i]); !status.is_ok()) fail_argument(schema, i, status);
    views[i].device = {on_cuda ? DeviceType::kCuda : DeviceType::kCpu, 0};
    operands[i] = &views[i];
  }
  for (size_t i = 0; i < schema.attributes().size(); ++i) {
    const Status status = to_attribute(args[next++], schema.attributes()[i].kind, &lists[i], &attributes[i]);
    if (!status.is_ok()) fail_argument(schema, schema.operands().size() + i, status);
  }
  GraphCall graph;
  throw_if_error(bind_graph_call(schema, std::span(operands).first(schema.operands().size()),
                                 std::span(attributes).first(schema.attributes().size()), &graph));
  std::vector<KernelVerdict> verdicts;
  throw_if_error(op.explain(graph.call, &verdicts));
  std::string refusals;
  for (const KernelVerdict& verdict : verdicts) {
    if (verdict.refusal.empty()) return std::string(verdict.kernel);
    refusals += (refusals.empty() ? "" : "; ") + std::string(verdict.kernel) + ": " + verdict.refusal;
  }
  throw_if_error(
      unsupported(schema.name() + ": " +
                  (refusals.empty() ? (on_cuda ? "it has no CUDA kernel" : "it has no CPU kernel") : refusals)));
  return "";
}

std::string all_schemas() {
  std::string json = "[";
  for (const auto& op : operators().all()) {
    if (json.size() > 1) json += ",";
    json += op->schema().to_json();
  }
  return json + "]";
}

const Operator& find_operator(const ffi::String& name) {
  const Operator* op = operators().find(std::string_view(name.data(), name.size()));
  if (op == nullptr) throw_if_error(invalid_argument("there is no operator " + std::string(name)));
  return *op;
}

/// The packed function of one kernel of an operator: as polyop.call.<operator>, but no other kernel runs.
ffi::Function kernel_function(const ffi::String& name, const ffi::String& kernel) {
  const Operator& op = find_operator(name);
  return ffi::Function::FromPacked(
      [&op, kernel = std::string(kernel)](ffi::PackedArgs args, ffi::Any*) { call_packed(op, args, kernel); });
}

/// Names of an operator's kernels in the order they are tried, "cpu:" or "cuda:" before each.
ffi::Array<ffi::String> kernel_names(const ffi::String& name) {
  ffi::Array<ffi::String> names;
  for (const KernelInfo& kernel : find_operator(name).kernels()) {
    names.push_back((kernel.device == DeviceType::kCpu ? "cpu:" : "cuda:") + std::string(kernel.name));
  }
  return names;
}

}  // namespace

void register_operators() {
  for (const auto& op : operators().all()) {
    const Operator& ref = *op;  // lives as long as the process
    const std::string& name = ref.schema().name();
    ffi::Function::SetGlobal(
        "polyop.call." + name,
        ffi::Function::FromPacked([&ref](ffi::PackedArgs args, ffi::Any*) { call_packed(ref, args); }), true);
    ffi::Function::SetGlobal(
        "polyop.check." + name,
        ffi::Function::FromPacked([&ref](ffi::PackedArgs args, ffi::Any*) { check_packed(ref, args); }), true);
    ffi::Function::SetGlobal(
        "polyop.check_node." + name,
        ffi::Function::FromPacked([&ref](ffi::PackedArgs args, ffi::Any* result) { *result = check_node(ref, args); }),
        true);
  }
  ffi::reflection::GlobalDef()
      .def("polyop.schemas", all_schemas)
      .def("polyop.kernel_names", kernel_names)
      .def("polyop.kernel_function", kernel_function)
      .def("polyop.check_cuda_errors", [] { throw_if_error(check_cuda_errors()); })
      .def("polyop.num_threads", [] { return static_cast<int64_t>(cpu::ThreadPool::shared().num_threads()); })
      .def("polyop.set_num_threads", [](int64_t num_threads) {
        if (num_threads < 1 || num_threads > 4096) {
          throw_if_error(
              invalid_argument("set_num_threads: got " + std::to_string(num_threads) + ", wanted 1 to 4096"));
        }
        const std::unique_lock lock(num_threads_mutex());
        cpu::ThreadPool::shared().set_num_threads(static_cast<int>(num_threads));
      });
}

}  // namespace polyop::tvm_ffi_host
