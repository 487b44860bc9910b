#include "polyop/core/call.h"

#include <array>
#include <new>

namespace polyop {

HostWorkspaces::~HostWorkspaces() { ::operator delete (data_, std::align_val_t{kWorkspaceAlignment}); }

Status HostWorkspaces::acquire(Device device, int64_t bytes, Workspace* workspace) {
  if (device.type != DeviceType::kCpu) return invalid_argument("host scratch memory was asked for on another device");
  if (bytes > bytes_) {
    ::operator delete (data_, std::align_val_t{kWorkspaceAlignment});
    data_ = ::operator new (static_cast<size_t>(bytes), std::align_val_t{kWorkspaceAlignment}, std::nothrow);
    bytes_ = data_ == nullptr ? 0 : bytes;
    if (data_ == nullptr) return resource_exhausted("no memory for " + std::to_string(bytes) + " bytes of workspace");
  }
  *workspace = {.data = data_, .bytes = bytes_};
  return Status::ok();
}

HostWorkspaces& HostWorkspaces::of_this_thread() {
  thread_local HostWorkspaces workspaces;
  return workspaces;
}

Status call_operator(const Operator& op, std::initializer_list<NamedTensor> operands,
                     std::initializer_list<NamedAttribute> attributes, Stream stream) {
  const OpSchema& schema = op.schema();
  std::array<const TensorView*, kMaxOperands> tensors{};
  for (const NamedTensor& operand : operands) {
    const int index = schema.operand_index(operand.name);
    if (index < 0) return invalid_argument(schema.name() + ": there is no operand " + std::string(operand.name));
    tensors[index] = &operand.tensor;
  }
  std::array<AttributeValue, kMaxAttributes> values{};
  for (const NamedAttribute& attribute : attributes) {
    const int index = schema.attribute_index(attribute.name);
    if (index < 0) return invalid_argument(schema.name() + ": there is no attribute " + std::string(attribute.name));
    values[index] = attribute.value;
  }
  BoundCall call;
  POLYOP_RETURN_IF_ERROR(bind_call(schema, std::span(tensors).first(schema.operands().size()),
                                   std::span<const AttributeValue>(values).first(schema.attributes().size()), &call));
  return op.run(call, HostWorkspaces::of_this_thread(), stream);
}

}  // namespace polyop
