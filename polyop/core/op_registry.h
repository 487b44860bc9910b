// Operator: a schema with the kernels that serve it, and OpRegistry: the operators by name. Hosts see nothing else of
// an operator.
#pragma once

#include <algorithm>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "polyop/core/kernel_list.h"
#include "polyop/core/op_schema.h"
#include "polyop/core/shape_binding.h"
#include "polyop/core/status.h"

namespace polyop {

/// Where a host takes scratch memory from. The memory stays valid until the operator's work in the stream is done.
class WorkspaceProvider {
 public:
  virtual ~WorkspaceProvider() = default;
  virtual Status acquire(Device device, int64_t bytes, Workspace* workspace) = 0;
};

/// Name and device of one kernel in the order it is tried.
struct KernelInfo {
  std::string_view name;
  DeviceType device;
};

class Operator {
 public:
  explicit Operator(OpSchema schema) : schema_(std::move(schema)) {}
  virtual ~Operator() = default;
  Operator(const Operator&) = delete;
  Operator& operator=(const Operator&) = delete;

  [[nodiscard]] const OpSchema& schema() const { return schema_; }

  /// Runs the first kernel that takes the bound call, or the one named `kernel` when a name is given (a host that times
  /// variants, a test that wants the reference). On a CUDA device the work is queued in `stream`.
  virtual Status run(const BoundCall& call, WorkspaceProvider& workspaces, Stream stream,
                     std::string_view kernel = {}) const = 0;

  /// What each kernel of the call's device says about it, in list order up to the first that takes it.
  virtual Status explain(const BoundCall& call, std::vector<KernelVerdict>* verdicts) const = 0;

  [[nodiscard]] virtual std::vector<KernelInfo> kernels() const = 0;

 private:
  OpSchema schema_;
};

/// The Operator over one problem struct. `make_problem` copies pointers, extents and attributes of a bound call into
/// the struct and refuses what the schema cannot express.
template <class Problem>
class OperatorOver final : public Operator {
 public:
  using MakeProblem = Status (*)(const BoundCall&, Problem*);

  OperatorOver(OpSchema schema, MakeProblem make_problem, std::span<const Kernel<Problem>> kernels)
      : Operator(std::move(schema)), make_problem_(make_problem), kernels_(kernels) {}

  Status run(const BoundCall& call, WorkspaceProvider& workspaces, Stream stream,
             std::string_view kernel_name) const override {
    Problem problem;
    POLYOP_RETURN_IF_ERROR(make_problem_(call, &problem));
    std::span<const Kernel<Problem>> candidates = kernels_;
    if (!kernel_name.empty()) {
      const auto named = std::find_if(candidates.begin(), candidates.end(),
                                      [&](const Kernel<Problem>& kernel) { return kernel.name == kernel_name; });
      if (named == candidates.end()) {
        return invalid_argument(schema().name() + ": there is no kernel " + std::string(kernel_name));
      }
      candidates = std::span(named, 1);
    }
    const Kernel<Problem>* kernel = nullptr;
    POLYOP_RETURN_IF_ERROR(choose_kernel(schema().name(), candidates, call.device.type, problem, &kernel));
    Workspace workspace;
    const int64_t bytes = kernel->workspace_bytes == nullptr ? 0 : kernel->workspace_bytes(problem);
    if (bytes > 0) POLYOP_RETURN_IF_ERROR(workspaces.acquire(call.device, bytes, &workspace));
    return kernel->launch(problem, workspace, stream);
  }

  Status explain(const BoundCall& call, std::vector<KernelVerdict>* verdicts) const override {
    Problem problem;
    POLYOP_RETURN_IF_ERROR(make_problem_(call, &problem));
    verdicts->clear();
    for (const Kernel<Problem>& kernel : kernels_) {
      if (kernel.device != call.device.type) continue;
      const Status verdict = kernel.supports(problem);
      verdicts->push_back({kernel.name, verdict.message()});
      if (verdict.is_ok()) break;
    }
    return Status::ok();
  }

  [[nodiscard]] std::vector<KernelInfo> kernels() const override {
    std::vector<KernelInfo> infos;
    for (const Kernel<Problem>& kernel : kernels_) infos.push_back({kernel.name, kernel.device});
    return infos;
  }

 private:
  MakeProblem make_problem_;
  std::span<const Kernel<Problem>> kernels_;
};

/// Operators by name. Filled once (see polyop/ops/operators.h), read from any thread afterwards.
class OpRegistry {
 public:
  /// Adds an operator; kInternal when its schema has defects or its name is taken.
  Status add(std::unique_ptr<Operator> op);

  /// The operator, or null.
  [[nodiscard]] const Operator* find(std::string_view name) const;

  [[nodiscard]] std::span<const std::unique_ptr<Operator>> all() const { return operators_; }

 private:
  std::vector<std::unique_ptr<Operator>> operators_;
};

}  // namespace polyop
