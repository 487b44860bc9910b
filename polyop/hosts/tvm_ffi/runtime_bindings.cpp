#include "polyop/hosts/tvm_ffi/runtime_bindings.h"

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/container/tuple.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/object.h>
#include <tvm/ffi/optional.h>
#include <tvm/ffi/reflection/registry.h>

#include <cstdint>
#include <span>
#include <string>
#include <unordered_set>
#include <vector>

#include "polyop/hosts/tvm_ffi/error_translation.h"
#include "polyop/runtime/kv_page_tables.h"
#include "polyop/runtime/ragged_batch.h"

namespace polyop::tvm_ffi_host {
namespace {

namespace ffi = ::tvm::ffi;
using runtime::KvPageTables;

/// Python's handle of one KvPageTables.
class PageTablesObj : public ffi::Object {
 public:
  PageTablesObj(int64_t num_pages, int64_t page_size, int64_t max_tokens) : tables(num_pages, page_size, max_tokens) {}

  static constexpr bool _type_mutable = true;  // methods change it through the shared handle
  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("polyop.runtime.PageTables", PageTablesObj, ffi::Object);

  KvPageTables tables;
};

class PageTables : public ffi::ObjectRef {
 public:
  explicit PageTables(ffi::ObjectPtr<PageTablesObj> object) : ffi::ObjectRef(std::move(object)) {}
  TVM_FFI_DEFINE_OBJECT_REF_METHODS_NOTNULLABLE(PageTables, ffi::ObjectRef, PageTablesObj);
};

// ---- translation ----------------------------------------------------------------------------------------------------

std::vector<int64_t> to_vector(const ffi::Array<int64_t>& values) {
  std::vector<int64_t> out;
  out.reserve(values.size());
  for (const int64_t value : values) out.push_back(value);
  return out;
}

/// An i32 host tensor of the wanted rank whose last stride is 1.
void check_i32_host(const char* function, const char* name, const ffi::TensorView& tensor, int32_t rank) {
  const DLDataType dtype = tensor.dtype();
  const bool is_i32 = dtype.code == kDLInt && dtype.bits == 32 && dtype.lanes == 1;
  const bool is_host = tensor.device().device_type == kDLCPU || tensor.device().device_type == kDLCUDAHost;
  if (is_i32 && is_host && tensor.ndim() == rank && (tensor.size(rank - 1) <= 1 || tensor.stride(rank - 1) == 1))
    return;
  throw_if_error(invalid_argument(std::string(function) + ": " + name + " must be an i32 host tensor of rank " +
                                  std::to_string(rank) + " with last stride 1"));
}

int32_t* i32_data(const ffi::TensorView& tensor) {
  return reinterpret_cast<int32_t*>(static_cast<char*>(tensor.data_ptr()) + tensor.byte_offset());
}

std::span<int32_t> i32_span(const char* name, const ffi::TensorView& tensor) {
  check_i32_host("fill_step", name, tensor, 1);
  return {i32_data(tensor), static_cast<size_t>(tensor.size(0))};
}

// ---- functions ------------------------------------------------------------------------------------------------------

PageTables create_page_tables(int64_t num_pages, int64_t page_size, int64_t max_tokens_per_sequence) {
  throw_if_error(KvPageTables::validate(num_pages, page_size, max_tokens_per_sequence));
  return PageTables(ffi::make_object<PageTablesObj>(num_pages, page_size, max_tokens_per_sequence));
}

/// Null, or (text, request id, needed pages, free pages) when the cache is full: the caller makes its own exception.
ffi::Optional<ffi::Tuple<ffi::String, int64_t, int64_t, int64_t>> reserve(const PageTables& handle,
                                                                          const ffi::Array<int64_t>& request_ids,
                                                                          const ffi::Array<int64_t>& num_tokens) {
  runtime::PageShortage shortage;
  const Status status = handle->tables.reserve(to_vector(request_ids), to_vector(num_tokens), &shortage);
  if (status.code() == StatusCode::kResourceExhausted) {
    return ffi::Tuple<ffi::String, int64_t, int64_t, int64_t>(ffi::String(status.message()), shortage.request_id,
                                                              shortage.needed_pages, shortage.free_pages);
  }
  throw_if_error(status);
  return std::nullopt;
}

ffi::Array<int64_t> pages(const PageTables& handle, int64_t request_id) {
  std::span<const int32_t> held;
  throw_if_error(handle->tables.pages(request_id, &held));
  return ffi::Array<int64_t>(std::vector<int64_t>(held.begin(), held.end()));
}

int64_t num_tokens(const PageTables& handle, int64_t request_id) {
  int64_t tokens = 0;
  throw_if_error(handle->tables.num_tokens(request_id, &tokens));
  return tokens;
}

void fill_page_table(const PageTables& handle, const ffi::Array<int64_t>& request_ids, ffi::TensorView table) {
  check_i32_host("fill_page_table", "table", table, 2);
  if (static_cast<int64_t>(request_ids.size()) > table.size(0)) {
    throw_if_error(invalid_argument("fill_page_table: table has " + std::to_string(table.size(0)) + " rows; got " +
                                    std::to_string(request_ids.size()) + " request ids"));
  }
  constexpr int32_t kPadding = 0;
  throw_if_error(handle->tables.fill_page_table(to_vector(request_ids), i32_data(table), table.size(1), table.stride(0),
                                                kPadding));
}

/// Each request once, known, and with room for its length after the step.
Status check_room(const KvPageTables& tables, std::span<const int64_t> request_ids,
                  const runtime::RaggedBatchLengths& lengths) {
  std::unordered_set<int64_t> seen;
  for (size_t i = 0; i < request_ids.size(); ++i) {
    if (!seen.insert(request_ids[i]).second) {
      return invalid_argument("fill_step: request " + std::to_string(request_ids[i]) + " appears twice in one batch");
    }
    int64_t reserved = 0;
    POLYOP_RETURN_IF_ERROR(tables.num_tokens(request_ids[i], &reserved));
    const int64_t wanted = lengths.past_tokens[i] + lengths.query_tokens[i];
    if (wanted > reserved) {
      return invalid_argument("fill_step: request " + std::to_string(request_ids[i]) + " has " +
                              std::to_string(lengths.past_tokens[i]) + " cached and " +
                              std::to_string(lengths.query_tokens[i]) + " new tokens; room is reserved for " +
                              std::to_string(reserved));
    }
  }
  return Status::ok();
}

/// All arrays of one step in one call; nothing is written when a check fails.
void fill_step(const ffi::Optional<PageTables>& handle, const ffi::Array<int64_t>& request_ids,
               const ffi::Array<int64_t>& query_lens, const ffi::Array<int64_t>& cached_lens,
               ffi::TensorView query_offsets, ffi::TensorView write_positions, ffi::TensorView kv_lengths,
               ffi::TensorView logits_rows, ffi::TensorView position_ids, ffi::TensorView page_table) {
  const std::vector<int64_t> ids = to_vector(request_ids);
  const std::vector<int64_t> query_tokens = to_vector(query_lens);
  const std::vector<int64_t> past_tokens = to_vector(cached_lens);
  const runtime::RaggedBatchLengths lengths{.query_tokens = query_tokens, .past_tokens = past_tokens};
  const runtime::RaggedBatchArrays arrays{.query_offsets = i32_span("query_offsets", query_offsets),
                                          .write_positions = i32_span("write_positions", write_positions),
                                          .kv_lengths = i32_span("kv_lengths", kv_lengths),
                                          .logits_rows = i32_span("logits_rows", logits_rows),
                                          .position_ids = i32_span("position_ids", position_ids)};
  runtime::RaggedBatchTotals totals;
  throw_if_error(runtime::check_ragged_batch(lengths, arrays, &totals));
  if (handle.has_value()) {
    check_i32_host("fill_step", "page_table", page_table, 2);
    const KvPageTables& tables = handle.value()->tables;
    if (ids.size() != query_tokens.size() || static_cast<int64_t>(ids.size()) > page_table.size(0)) {
      throw_if_error(invalid_argument("fill_step: got " + std::to_string(ids.size()) + " request ids and " +
                                      std::to_string(query_tokens.size()) + " lengths; page_table has " +
                                      std::to_string(page_table.size(0)) + " rows"));
    }
    throw_if_error(check_room(tables, ids, lengths));
    constexpr int32_t kPadding = -1;  // no page: a kernel that reads past a length is caught by its bounds check
    throw_if_error(
        tables.fill_page_table(ids, i32_data(page_table), page_table.size(1), page_table.stride(0), kPadding));
  }
  throw_if_error(runtime::fill_ragged_batch(lengths, arrays, &totals));
}

}  // namespace

void register_runtime_functions() {
  namespace refl = ffi::reflection;
  refl::ObjectDef<PageTablesObj>();
  refl::GlobalDef()
      .def("polyop.runtime.create_page_tables", create_page_tables)
      .def("polyop.runtime.reserve", reserve)
      .def("polyop.runtime.rewind", [](const PageTables& handle, int64_t request_id,
                                       int64_t tokens) { throw_if_error(handle->tables.rewind(request_id, tokens)); })
      .def("polyop.runtime.release",
           [](const PageTables& handle, int64_t request_id) { throw_if_error(handle->tables.release(request_id)); })
      .def("polyop.runtime.num_tokens", num_tokens)
      .def("polyop.runtime.pages", pages)
      .def("polyop.runtime.num_free_pages",
           [](const PageTables& handle) { return handle->tables.allocator().num_free_pages(); })
      .def("polyop.runtime.max_pages_per_sequence",
           [](const PageTables& handle) { return handle->tables.max_pages_per_sequence(); })
      .def("polyop.runtime.fill_page_table", fill_page_table)
      .def("polyop.runtime.fill_step", fill_step);
}

}  // namespace polyop::tvm_ffi_host
