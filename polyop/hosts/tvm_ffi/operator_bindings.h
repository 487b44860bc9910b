// Global functions "polyop.call.<operator>": the operators for Python.
#pragma once

namespace polyop::tvm_ffi_host {

/// Registers one packed function for each operator of the library, and "polyop.schemas" (all schemas as a JSON list);
/// call once when the module is loaded.
void register_operators();

}  // namespace polyop::tvm_ffi_host
