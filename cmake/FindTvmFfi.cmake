# FindTvmFfi: the apache-tvm-ffi wheel of a Python interpreter.
#
# Asks the interpreter in Python_EXECUTABLE where the wheel keeps its headers and its library. Defines TvmFfi_FOUND,
# TvmFfi_VERSION and the imported target TvmFfi::tvm_ffi.

if(Python_EXECUTABLE)
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -c
            "import importlib.metadata as m; from tvm_ffi import libinfo as i; \
print(i.find_include_path(), i.find_dlpack_include_path(), i.find_libtvm_ffi(), m.version('apache-tvm-ffi'), sep=';')"
    OUTPUT_VARIABLE TvmFfi_answer
    OUTPUT_STRIP_TRAILING_WHITESPACE
    ERROR_QUIET
    RESULT_VARIABLE TvmFfi_status)
  if(TvmFfi_status EQUAL 0)
    list(GET TvmFfi_answer 0 TvmFfi_INCLUDE_DIR)
    list(GET TvmFfi_answer 1 TvmFfi_DLPACK_INCLUDE_DIR)
    list(GET TvmFfi_answer 2 TvmFfi_LIBRARY)
    list(GET TvmFfi_answer 3 TvmFfi_VERSION)
  endif()
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(
  TvmFfi
  REQUIRED_VARS TvmFfi_LIBRARY TvmFfi_INCLUDE_DIR TvmFfi_DLPACK_INCLUDE_DIR
  VERSION_VAR TvmFfi_VERSION)

if(TvmFfi_FOUND AND NOT TARGET TvmFfi::tvm_ffi)
  add_library(TvmFfi::tvm_ffi SHARED IMPORTED)
  set_target_properties(
    TvmFfi::tvm_ffi
    PROPERTIES IMPORTED_LOCATION "${TvmFfi_LIBRARY}"
               INTERFACE_INCLUDE_DIRECTORIES "${TvmFfi_INCLUDE_DIR};${TvmFfi_DLPACK_INCLUDE_DIR}"
               INTERFACE_SYSTEM_INCLUDE_DIRECTORIES "${TvmFfi_INCLUDE_DIR};${TvmFfi_DLPACK_INCLUDE_DIR}")
endif()
