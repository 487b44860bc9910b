// The one place where a Status becomes a Python exception.
#pragma once

#include "polyop/core/status.h"

namespace polyop::tvm_ffi_host {

/// Throws what Python shows as ValueError (kInvalidArgument), NotImplementedError (kUnsupported) or RuntimeError (all
/// else); returns when ok.
void throw_if_error(const Status& status);

}  // namespace polyop::tvm_ffi_host
