// Calls on CUDA devices: device guard, scratch memory, and the check of the sticky error flags.
#pragma once

#include <string_view>

#include "polyop/core/op_registry.h"
#include "polyop/core/status.h"

namespace polyop::tvm_ffi_host {

/// As Operator::run for a call whose device is a GPU. The current device is changed for the call and put back. Scratch
/// memory belongs to the stream: it grows at a call that needs more than any before it on this stream and is never
/// given back, since a captured graph may hold its address. Two graphs that were captured in one stream share it and
/// must not run at the same time. kUnsupported on a GPU older than compute capability 8.0 or when the library has no
/// CUDA kernels.
Status run_on_cuda(const Operator& op, const BoundCall& call, Stream stream, std::string_view kernel);

/// kInvalidArgument naming every operand of which a kernel skipped an entry since the last check. Waits for the device.
Status check_cuda_errors();

}  // namespace polyop::tvm_ffi_host
