// call_kernel: call_operator for one kernel by name, and with operands that may be absent.
#pragma once

#include <array>
#include <string>
#include <string_view>
#include <vector>

#include "polyop/core/call.h"
#include "polyop/ops/operators.h"

namespace polyop::testing {

struct Call {
  std::string op;
  std::vector<NamedTensor> operands;
  std::vector<NamedAttribute> attributes;
};

/// Binds the call and runs `kernel` (empty: the first that takes it).
inline Status call_kernel(const Call& call, std::string_view kernel = {}) {
  const Operator* op = operators().find(call.op);
  if (op == nullptr) return internal_error(call.op + " is not registered");
  const OpSchema& schema = op->schema();
  std::array<const TensorView*, kMaxOperands> tensors{};
  for (const NamedTensor& operand : call.operands) {
    const int index = schema.operand_index(operand.name);
    if (index < 0) return invalid_argument("no operand " + std::string(operand.name));
    tensors[static_cast<size_t>(index)] = &operand.tensor;
  }
  std::array<AttributeValue, kMaxAttributes> values{};
  for (const NamedAttribute& attribute : call.attributes) {
    const int index = schema.attribute_index(attribute.name);
    if (index < 0) return invalid_argument("no attribute " + std::string(attribute.name));
    values[static_cast<size_t>(index)] = attribute.value;
  }
  BoundCall bound;
  POLYOP_RETURN_IF_ERROR(bind_call(schema, std::span(tensors).first(schema.operands().size()),
                                   std::span<const AttributeValue>(values).first(schema.attributes().size()), &bound));
  return op->run(bound, HostWorkspaces::of_this_thread(), {}, kernel);
}

/// The message of a call that must fail with `code`; a text of its own otherwise.
inline std::string refusal(const Call& call, StatusCode code = StatusCode::kInvalidArgument) {
  const Status status = call_kernel(call);
  if (status.is_ok()) return "(accepted)";
  if (status.code() != code) return std::string(status_code_name(status.code())) + ": " + status.message();
  return status.message();
}

}  // namespace polyop::testing
