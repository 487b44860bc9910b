// KvPageTables: which pages of a KV-cache pool belong to which request, and how many tokens each request has reserved.
#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "polyop/core/status.h"
#include "polyop/runtime/page_allocator.h"

namespace polyop::runtime {

/// Numbers behind a kResourceExhausted status of KvPageTables.
struct PageShortage {
  int64_t request_id = 0;
  int64_t needed_pages = 0;  // further pages this request asked for
  int64_t free_pages = 0;    // pages left for it (in a batch: after the requests named before it)
};

/// Every call either succeeds or leaves the state as it was. Not thread-safe.
class KvPageTables {
 public:
  /// max_tokens_per_sequence bounds the length of one request and so the width of a dense page table.
  static Status validate(int64_t num_pages, int64_t page_size, int64_t max_tokens_per_sequence);

  /// The arguments must pass validate().
  KvPageTables(int64_t num_pages, int64_t page_size, int64_t max_tokens_per_sequence);

  // ---- change ----

  /// Starts a request with room for num_tokens tokens. A known request_id is kInvalidArgument.
  Status add_sequence(int64_t request_id, int64_t num_tokens, PageShortage* shortage = nullptr);
  /// Makes room for num_tokens more tokens. An unknown request_id is kInvalidArgument.
  Status append(int64_t request_id, int64_t num_tokens, PageShortage* shortage = nullptr);
  /// One batch step, all or nothing: appends to known requests and adds unknown ones, in order. No id may repeat.
  Status reserve(std::span<const int64_t> request_ids, std::span<const int64_t> num_tokens,
                 PageShortage* shortage = nullptr);
  /// Gives back the last num_tokens tokens (rejected drafts) and the pages only they needed.
  Status rewind(int64_t request_id, int64_t num_tokens);
  /// Ends a request and frees its pages.
  Status release(int64_t request_id);

  // ---- read ----

  [[nodiscard]] const PageAllocator& allocator() const { return allocator_; }
  [[nodiscard]] int64_t max_tokens_per_sequence() const { return max_tokens_per_sequence_; }
  /// Width W of a page table that holds any request.
  [[nodiscard]] int64_t max_pages_per_sequence() const;
  [[nodiscard]] int64_t num_sequences() const { return static_cast<int64_t>(sequences_.size()); }
  [[nodiscard]] bool contains(int64_t request_id) const { return sequences_.contains(request_id); }
  /// Reserved tokens of a request.
  Status num_tokens(int64_t request_id, int64_t* num_tokens) const;
  /// Pages of a request in order of position; the span is valid until the next change.
  Status pages(int64_t request_id, std::span<const int32_t>* pages) const;
  /// Writes a dense table [B, width] i32 with rows row_stride elements apart; entries past a request's pages become
  /// `padding`. Checks every request before the first write.
  Status fill_page_table(std::span<const int64_t> request_ids, int32_t* table, int64_t width, int64_t row_stride,
                         int32_t padding) const;

 private:
  struct Sequence {
    int64_t num_tokens = 0;
    std::vector<int32_t> pages;
  };

  Status check_growth(int64_t request_id, int64_t past_tokens, int64_t more_tokens) const;
  Status find(const char* what, int64_t request_id, const Sequence** sequence) const;
  /// Grows without checks; the caller has counted the free pages.
  void grow(Sequence& sequence, int64_t num_tokens);

  PageAllocator allocator_;
  int64_t max_tokens_per_sequence_;
  std::unordered_map<int64_t, Sequence> sequences_;
};

}  // namespace polyop::runtime
