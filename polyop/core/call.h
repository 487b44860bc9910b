// call_operator: runs an operator from plain C++ with operands and attributes by name.
#pragma once

#include <initializer_list>
#include <string_view>

#include "polyop/core/op_registry.h"
#include "polyop/core/status.h"
#include "polyop/core/tensor_view.h"

namespace polyop {

/// Scratch memory on the CPU that grows to the largest request and is kept for the next one. Not for several threads at
/// once.
class HostWorkspaces final : public WorkspaceProvider {
 public:
  HostWorkspaces() = default;
  ~HostWorkspaces() override;
  HostWorkspaces(const HostWorkspaces&) = delete;
  HostWorkspaces& operator=(const HostWorkspaces&) = delete;

  /// kInvalidArgument for a device other than the CPU, kResourceExhausted when memory is short.
  Status acquire(Device device, int64_t bytes, Workspace* workspace) override;

  /// The calling thread's own.
  static HostWorkspaces& of_this_thread();

 private:
  void* data_ = nullptr;
  int64_t bytes_ = 0;
};

struct NamedTensor {
  std::string_view name;
  TensorView tensor;
};

struct NamedAttribute {
  std::string_view name;
  AttributeValue value;
};

/// Binds and runs one call. Operands (outputs included) that are not named are absent, attributes that are not named
/// take their defaults; an unknown name is kInvalidArgument. On the CPU the outputs are complete on return.
Status call_operator(const Operator& op, std::initializer_list<NamedTensor> operands,
                     std::initializer_list<NamedAttribute> attributes = {}, Stream stream = {});

}  // namespace polyop
