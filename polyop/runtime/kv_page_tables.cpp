#include "polyop/runtime/kv_page_tables.h"

#include <algorithm>
#include <string>
#include <unordered_set>

namespace polyop::runtime {

// ---- construction ---------------------------------------------------------------------------------------------------

Status KvPageTables::validate(int64_t num_pages, int64_t page_size, int64_t max_tokens_per_sequence) {
  POLYOP_RETURN_IF_ERROR(PageAllocator::validate(num_pages, page_size));
  if (max_tokens_per_sequence < 1) {
    return invalid_argument("kv page tables: max_tokens_per_sequence is " + std::to_string(max_tokens_per_sequence) +
                            "; wanted at least 1");
  }
  return Status::ok();
}

KvPageTables::KvPageTables(int64_t num_pages, int64_t page_size, int64_t max_tokens_per_sequence)
    : allocator_(num_pages, page_size), max_tokens_per_sequence_(max_tokens_per_sequence) {}

// ---- change ---------------------------------------------------------------------------------------------------------

Status KvPageTables::add_sequence(int64_t request_id, int64_t num_tokens, PageShortage* shortage) {
  if (contains(request_id)) {
    return invalid_argument("kv page tables: request " + std::to_string(request_id) + " exists already");
  }
  return reserve({&request_id, 1}, {&num_tokens, 1}, shortage);
}

Status KvPageTables::append(int64_t request_id, int64_t num_tokens, PageShortage* shortage) {
  const Sequence* sequence = nullptr;
  POLYOP_RETURN_IF_ERROR(find("append", request_id, &sequence));
  return reserve({&request_id, 1}, {&num_tokens, 1}, shortage);
}

Status KvPageTables::reserve(std::span<const int64_t> request_ids, std::span<const int64_t> num_tokens,
                             PageShortage* shortage) {
  if (request_ids.size() != num_tokens.size()) {
    return invalid_argument("kv page tables: reserve got " + std::to_string(request_ids.size()) + " request ids and " +
                            std::to_string(num_tokens.size()) + " token counts");
  }
  // First pass: count, change nothing.
  std::unordered_set<int64_t> seen;
  int64_t free_pages = allocator_.num_free_pages();
  for (size_t i = 0; i < request_ids.size(); ++i) {
    const int64_t id = request_ids[i];
    if (request_ids.size() > 1 && !seen.insert(id).second) {
      return invalid_argument("kv page tables: request " + std::to_string(id) + " appears twice in one batch");
    }
    const auto found = sequences_.find(id);
    const int64_t past = found == sequences_.end() ? 0 : found->second.num_tokens;
    POLYOP_RETURN_IF_ERROR(check_growth(id, past, num_tokens[i]));
    const int64_t held = found == sequences_.end() ? 0 : static_cast<int64_t>(found->second.pages.size());
    const int64_t needed = allocator_.pages_for_tokens(past + num_tokens[i]) - held;
    if (needed > free_pages) {
      if (shortage != nullptr) *shortage = {.request_id = id, .needed_pages = needed, .free_pages = free_pages};
      return resource_exhausted("kv cache is full: request " + std::to_string(id) + " needs " + std::to_string(needed) +
                                " more page(s) for " + std::to_string(num_tokens[i]) + " token(s); " +
                                std::to_string(free_pages) + " of " + std::to_string(allocator_.num_pages()) +
                                " pages are free");
    }
    free_pages -= needed;
  }
  for (size_t i = 0; i < request_ids.size(); ++i) grow(sequences_[request_ids[i]], num_tokens[i]);
  return Status::ok();
}

Status KvPageTables::rewind(int64_t request_id, int64_t num_tokens) {
  const Sequence* found = nullptr;
  POLYOP_RETURN_IF_ERROR(find("rewind", request_id, &found));
  if (num_tokens < 0 || num_tokens > found->num_tokens) {
    return invalid_argument("kv page tables: rewind of request " + std::to_string(request_id) + " by " +
                            std::to_string(num_tokens) + " tokens; wanted 0 to " + std::to_string(found->num_tokens));
  }
  Sequence& sequence = sequences_.at(request_id);
  sequence.num_tokens -= num_tokens;
  const auto kept = static_cast<size_t>(allocator_.pages_for_tokens(sequence.num_tokens));
  while (sequence.pages.size() > kept) {
    POLYOP_RETURN_IF_ERROR(allocator_.free(sequence.pages.back()));
    sequence.pages.pop_back();
  }
  return Status::ok();
}

Status KvPageTables::release(int64_t request_id) {
  const Sequence* found = nullptr;
  POLYOP_RETURN_IF_ERROR(find("release", request_id, &found));
  // Last page first: the next request of this size gets the same pages in the same order.
  for (auto page = found->pages.rbegin(); page != found->pages.rend(); ++page) {
    POLYOP_RETURN_IF_ERROR(allocator_.free(*page));
  }
  sequences_.erase(request_id);
  return Status::ok();
}

// ---- read -----------------------------------------------------------------------------------------------------------

int64_t KvPageTables::max_pages_per_sequence() const {
  return std::min(allocator_.pages_for_tokens(max_tokens_per_sequence_), allocator_.num_pages());
}

Status KvPageTables::num_tokens(int64_t request_id, int64_t* num_tokens) const {
  const Sequence* sequence = nullptr;
  POLYOP_RETURN_IF_ERROR(find("num_tokens", request_id, &sequence));
  *num_tokens = sequence->num_tokens;
  return Status::ok();
}

Status KvPageTables::pages(int64_t request_id, std::span<const int32_t>* pages) const {
  const Sequence* sequence = nullptr;
  POLYOP_RETURN_IF_ERROR(find("pages", request_id, &sequence));
  *pages = sequence->pages;
  return Status::ok();
}

Status KvPageTables::fill_page_table(std::span<const int64_t> request_ids, int32_t* table, int64_t width,
                                     int64_t row_stride, int32_t padding) const {
  for (const int64_t id : request_ids) {
    const Sequence* sequence = nullptr;
    POLYOP_RETURN_IF_ERROR(find("page table", id, &sequence));
    if (static_cast<int64_t>(sequence->pages.size()) > width) {
      return invalid_argument("kv page tables: page table has " + std::to_string(width) + " columns; request " +
                              std::to_string(id) + " holds " + std::to_string(sequence->pages.size()) + " pages");
    }
  }
  for (size_t row = 0; row < request_ids.size(); ++row) {
    const std::vector<int32_t>& pages = sequences_.at(request_ids[row]).pages;
    int32_t* out = table + static_cast<int64_t>(row) * row_stride;
    std::fill(std::copy(pages.begin(), pages.end(), out), out + width, padding);
  }
  return Status::ok();
}

// ---- helpers --------------------------------------------------------------------------------------------------------

Status KvPageTables::check_growth(int64_t request_id, int64_t past_tokens, int64_t more_tokens) const {
  if (more_tokens < 0) {
    return invalid_argument("kv page tables: request " + std::to_string(request_id) + " asks for " +
                            std::to_string(more_tokens) + " tokens; wanted at least 0");
  }
  if (more_tokens > max_tokens_per_sequence_ - past_tokens) {  // written so that the sum cannot overflow
    return invalid_argument("kv page tables: request " + std::to_string(request_id) + " holds " +
                            std::to_string(past_tokens) + " tokens and asks for " + std::to_string(more_tokens) +
                            " more; a sequence holds at most " + std::to_string(max_tokens_per_sequence_));
  }
  return Status::ok();
}

Status KvPageTables::find(const char* what, int64_t request_id, const Sequence** sequence) const {
  const auto found = sequences_.find(request_id);
  if (found == sequences_.end()) {
    return invalid_argument("kv page tables: " + std::string(what) + ": request " + std::to_string(request_id) +
                            " is unknown");
  }
  *sequence = &found->second;
  return Status::ok();
}

void KvPageTables::grow(Sequence& sequence, int64_t num_tokens) {
  sequence.num_tokens += num_tokens;
  const auto wanted = static_cast<size_t>(allocator_.pages_for_tokens(sequence.num_tokens));
  while (sequence.pages.size() < wanted) {
    int32_t page = 0;
    if (!allocator_.allocate(&page).is_ok()) return;  // unreachable: reserve counted the free pages
    sequence.pages.push_back(page);
  }
}

}  // namespace polyop::runtime
