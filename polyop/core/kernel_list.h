// KernelList: the ordered implementations of one operator. The first entry that agrees to take the problem runs; the
// reference stands last on the CPU. To learn what exists and in what order it is tried, read the operator's list.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "polyop/core/status.h"
#include "polyop/core/tensor_view.h"

namespace polyop {

/// Scratch memory that the host hands to a kernel: at least `Kernel::workspace_bytes`, aligned to kWorkspaceAlignment,
/// on the problem's device, contents undefined.
struct Workspace {
  void* data = nullptr;
  int64_t bytes = 0;
};
inline constexpr int64_t kWorkspaceAlignment = 256;

/// The queue a kernel runs in: a cudaStream_t on CUDA devices, unused on the CPU (a CPU kernel has finished on return).
struct Stream {
  void* handle = nullptr;
};

/// One implementation. Kernels never allocate, throw, print or synchronise. `Problem` holds pointers, extents, strides
/// and attributes of all operands, outputs included.
template <class Problem>
struct Kernel {
  std::string_view name;
  DeviceType device;
  /// Ok, or kUnsupported with the reason in the words of the operator's schema.
  Status (*supports)(const Problem&);
  /// Scratch the launch needs; null when none.
  int64_t (*workspace_bytes)(const Problem&);
  Status (*launch)(const Problem&, Workspace, Stream);
};

/// What one kernel said about one problem; an empty reason means that it takes it.
struct KernelVerdict {
  std::string_view kernel;
  std::string refusal;
};

namespace internal {

/// True when POLYOP_LOG contains "dispatch"; read once.
inline bool dispatch_log_enabled() {
  static const bool enabled = [] {
    const char* value = std::getenv("POLYOP_LOG");
    return value != nullptr && std::string_view(value).find("dispatch") != std::string_view::npos;
  }();
  return enabled;
}

}  // namespace internal

/// The first kernel of `kernels` on `device` that takes `problem`, in `*chosen`; otherwise kUnsupported with the reason
/// of every kernel. `op_name` starts the text.
template <class Problem>
Status choose_kernel(std::string_view op_name, std::span<const Kernel<Problem>> kernels, DeviceType device,
                     const Problem& problem, const Kernel<Problem>** chosen) {
  std::string refusals;
  for (const Kernel<Problem>& kernel : kernels) {
    if (kernel.device != device) continue;
    Status verdict = kernel.supports(problem);
    if (verdict.is_ok()) {
      if (internal::dispatch_log_enabled()) {
        std::fprintf(stderr, "polyop dispatch: %.*s runs %.*s%s%s\n", static_cast<int>(op_name.size()), op_name.data(),
                     static_cast<int>(kernel.name.size()), kernel.name.data(),
                     refusals.empty() ? "" : "; refused: ", refusals.c_str());
      }
      *chosen = &kernel;
      return Status::ok();
    }
    if (!refusals.empty()) refusals += "; ";
    refusals += std::string(kernel.name) + ": " + verdict.message();
  }
  if (refusals.empty()) refusals = device == DeviceType::kCuda ? "it has no CUDA kernel" : "it has no CPU kernel";
  return unsupported(std::string(op_name) + ": no kernel takes this call: " + refusals);
}

}  // namespace polyop
