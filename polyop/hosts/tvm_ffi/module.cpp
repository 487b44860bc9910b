// The module polyop_ffi: loading it registers every function with tvm-ffi.
#include <tvm/ffi/base_detail.h>

#include "polyop/hosts/tvm_ffi/operator_bindings.h"
#include "polyop/hosts/tvm_ffi/runtime_bindings.h"

TVM_FFI_STATIC_INIT_BLOCK() {
  polyop::tvm_ffi_host::register_operators();
  polyop::tvm_ffi_host::register_runtime_functions();
}
