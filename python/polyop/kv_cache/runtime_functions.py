"""The functions of polyop/runtime, looked up once in the compiled module.

They take the page-table object that ``create_page_tables`` returns. kInvalidArgument comes back as ValueError.
"""

from __future__ import annotations

import tvm_ffi

import polyop.ops  # noqa: F401  (loads the compiled module, which registers the functions)

create_page_tables = tvm_ffi.get_global_func("polyop.runtime.create_page_tables")
reserve = tvm_ffi.get_global_func("polyop.runtime.reserve")
rewind = tvm_ffi.get_global_func("polyop.runtime.rewind")
release = tvm_ffi.get_global_func("polyop.runtime.release")
num_tokens = tvm_ffi.get_global_func("polyop.runtime.num_tokens")
pages = tvm_ffi.get_global_func("polyop.runtime.pages")
num_free_pages = tvm_ffi.get_global_func("polyop.runtime.num_free_pages")
max_pages_per_sequence = tvm_ffi.get_global_func("polyop.runtime.max_pages_per_sequence")
fill_page_table = tvm_ffi.get_global_func("polyop.runtime.fill_page_table")
fill_step = tvm_ffi.get_global_func("polyop.runtime.fill_step")
