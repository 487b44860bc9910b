#include "polyop/runtime/page_allocator.h"

#include <limits>
#include <string>

namespace polyop::runtime {

Status PageAllocator::validate(int64_t num_pages, int64_t page_size) {
  constexpr int64_t kMaxPages = std::numeric_limits<int32_t>::max();
  if (num_pages < 0 || num_pages > kMaxPages) {
    return invalid_argument("page allocator: num_pages is " + std::to_string(num_pages) + "; wanted 0 to " +
                            std::to_string(kMaxPages));
  }
  if (page_size < 1) {
    return invalid_argument("page allocator: page_size is " + std::to_string(page_size) + "; wanted at least 1");
  }
  return Status::ok();
}

PageAllocator::PageAllocator(int64_t num_pages, int64_t page_size)
    : num_pages_(num_pages), page_size_(page_size), allocated_(static_cast<size_t>(num_pages), 0) {
  free_stack_.reserve(static_cast<size_t>(num_pages));
  for (int64_t page = num_pages - 1; page >= 0; --page) free_stack_.push_back(static_cast<int32_t>(page));
}

bool PageAllocator::is_allocated(int64_t page) const {
  return page >= 0 && page < num_pages_ && allocated_[static_cast<size_t>(page)] != 0;
}

int64_t PageAllocator::pages_for_tokens(int64_t num_tokens) const {
  // Not (n + R - 1) / R: the sum overflows for lengths near 2^63.
  return num_tokens / page_size_ + (num_tokens % page_size_ != 0 ? 1 : 0);
}

Status PageAllocator::allocate(int32_t* page) {
  if (free_stack_.empty()) {
    return resource_exhausted("page allocator: all " + std::to_string(num_pages_) + " pages are in use");
  }
  *page = free_stack_.back();
  free_stack_.pop_back();
  allocated_[static_cast<size_t>(*page)] = 1;
  return Status::ok();
}

Status PageAllocator::free(int64_t page) {
  if (page < 0 || page >= num_pages_) {
    return invalid_argument("page allocator: page to free is " + std::to_string(page) + "; wanted 0 to " +
                            std::to_string(num_pages_ - 1));
  }
  if (!is_allocated(page)) {
    return invalid_argument("page allocator: page " + std::to_string(page) + " is free already");
  }
  allocated_[static_cast<size_t>(page)] = 0;
  free_stack_.push_back(static_cast<int32_t>(page));
  return Status::ok();
}

}  // namespace polyop::runtime
