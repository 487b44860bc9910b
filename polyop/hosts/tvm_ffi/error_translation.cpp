#include "polyop/hosts/tvm_ffi/error_translation.h"

#include <tvm/ffi/error.h>

namespace polyop::tvm_ffi_host {

void throw_if_error(const Status& status) {
  if (status.is_ok()) return;
  const char* kind = status.code() == StatusCode::kInvalidArgument ? "ValueError"
                     : status.code() == StatusCode::kUnsupported   ? "NotImplementedError"
                                                                   : "RuntimeError";
  throw ::tvm::ffi::Error(kind, status.message(), "");
}

}  // namespace polyop::tvm_ffi_host
