#include "polyop/core/op_registry.h"

namespace polyop {

Status OpRegistry::add(std::unique_ptr<Operator> op) {
  const OpSchema& schema = op->schema();
  if (!schema.defects().empty()) return internal_error(schema.name() + ": defective schema: " + schema.defects()[0]);
  if (find(schema.name()) != nullptr) return internal_error(schema.name() + " is registered twice");
  operators_.push_back(std::move(op));
  return Status::ok();
}

const Operator* OpRegistry::find(std::string_view name) const {
  for (const auto& op : operators_) {
    if (op->schema().name() == name) return op.get();
  }
  return nullptr;
}

}  // namespace polyop
