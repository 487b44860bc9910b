// PageAllocator: hands out page numbers of a KV-cache pool. Bookkeeping only: it never sees the memory of a page.
#pragma once

#include <cstdint>
#include <vector>

#include "polyop/core/status.h"

namespace polyop::runtime {

/// Free pages are kept on a stack, so allocate and free cost O(1), and the order is a pure function of the calls made:
/// a fresh allocator gives 0, 1, 2, …; a freed page is the next one given. Not thread-safe.
class PageAllocator {
 public:
  /// Pages are numbered by i32 in page tables, which bounds num_pages.
  static Status validate(int64_t num_pages, int64_t page_size);

  /// num_pages and page_size must pass validate().
  PageAllocator(int64_t num_pages, int64_t page_size);

  [[nodiscard]] int64_t num_pages() const { return num_pages_; }
  /// Tokens per page (R).
  [[nodiscard]] int64_t page_size() const { return page_size_; }
  [[nodiscard]] int64_t num_free_pages() const { return static_cast<int64_t>(free_stack_.size()); }
  /// False for a page number out of range.
  [[nodiscard]] bool is_allocated(int64_t page) const;
  /// Pages that hold num_tokens tokens. num_tokens must not be negative.
  [[nodiscard]] int64_t pages_for_tokens(int64_t num_tokens) const;

  /// Writes the page number to *page. kResourceExhausted when none is free.
  Status allocate(int32_t* page);
  /// kInvalidArgument for a number out of range or a page that is free already; nothing changes then.
  Status free(int64_t page);

 private:
  int64_t num_pages_;
  int64_t page_size_;
  std::vector<int32_t> free_stack_;
  std::vector<uint8_t> allocated_;  // one flag per page: catches a double free
};

}  // namespace polyop::runtime
