// Global functions "polyop.runtime.*": the bookkeeping of polyop/runtime for Python.
#pragma once

namespace polyop::tvm_ffi_host {

/// Registers the functions in the process-wide table of tvm-ffi; call once when the module is loaded.
void register_runtime_functions();

}  // namespace polyop::tvm_ffi_host
