#include "polyop/runtime/kv_page_tables.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <map>
#include <random>
#include <set>
#include <vector>

namespace polyop::runtime {
namespace {

std::vector<int32_t> pages_of(const KvPageTables& tables, int64_t request_id) {
  std::span<const int32_t> pages;
  EXPECT_TRUE(tables.pages(request_id, &pages).is_ok());
  return {pages.begin(), pages.end()};
}

int64_t tokens_of(const KvPageTables& tables, int64_t request_id) {
  int64_t tokens = -1;
  EXPECT_TRUE(tables.num_tokens(request_id, &tokens).is_ok());
  return tokens;
}

TEST(KvPageTables, TakesAPageOnlyWhenTheLastOneIsFull) {
  KvPageTables tables(8, 4, 100);
  ASSERT_TRUE(tables.add_sequence(5, 4).is_ok());
  EXPECT_EQ(pages_of(tables, 5), (std::vector<int32_t>{0}));
  ASSERT_TRUE(tables.append(5, 1).is_ok());
  EXPECT_EQ(pages_of(tables, 5), (std::vector<int32_t>{0, 1}));
  ASSERT_TRUE(tables.append(5, 3).is_ok());
  EXPECT_EQ(pages_of(tables, 5), (std::vector<int32_t>{0, 1}));
  EXPECT_EQ(tokens_of(tables, 5), 8);
}

TEST(KvPageTables, EmptySequenceHoldsNoPage) {
  KvPageTables tables(1, 4, 100);
  ASSERT_TRUE(tables.add_sequence(1, 0).is_ok());
  EXPECT_TRUE(pages_of(tables, 1).empty());
  EXPECT_EQ(tables.allocator().num_free_pages(), 1);
  EXPECT_TRUE(tables.release(1).is_ok());
}

TEST(KvPageTables, RewindFreesPagesThatOnlyRejectedTokensNeeded) {
  KvPageTables tables(8, 4, 100);
  ASSERT_TRUE(tables.add_sequence(1, 10).is_ok());
  ASSERT_TRUE(tables.rewind(1, 2).is_ok());
  EXPECT_EQ(pages_of(tables, 1), (std::vector<int32_t>{0, 1}));
  ASSERT_TRUE(tables.rewind(1, 8).is_ok());
  EXPECT_TRUE(pages_of(tables, 1).empty());
  EXPECT_EQ(tables.rewind(1, 1).message(), "kv page tables: rewind of request 1 by 1 tokens; wanted 0 to 0");
  ASSERT_TRUE(tables.append(1, 5).is_ok());
  EXPECT_EQ(pages_of(tables, 1), (std::vector<int32_t>{0, 1})) << "freed pages come back in the same order";
}

TEST(KvPageTables, CapacityErrorNamesTheNumbersAndChangesNothing) {
  KvPageTables tables(3, 4, 100);
  ASSERT_TRUE(tables.add_sequence(1, 8).is_ok());
  PageShortage shortage;
  const Status status = tables.add_sequence(2, 9, &shortage);
  EXPECT_EQ(status.code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(status.message(), "kv cache is full: request 2 needs 3 more page(s) for 9 token(s); 1 of 3 pages are free");
  EXPECT_EQ(shortage.request_id, 2);
  EXPECT_EQ(shortage.needed_pages, 3);
  EXPECT_EQ(shortage.free_pages, 1);
  EXPECT_FALSE(tables.contains(2));
  EXPECT_EQ(tables.append(1, 5).code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(tokens_of(tables, 1), 8);
  EXPECT_EQ(tables.allocator().num_free_pages(), 1);
  EXPECT_TRUE(tables.append(1, 4).is_ok()) << "the last page must still be usable";
  EXPECT_EQ(tables.allocator().num_free_pages(), 0);
}

TEST(KvPageTables, BatchReservationIsAllOrNothing) {
  KvPageTables tables(4, 4, 100);
  ASSERT_TRUE(tables.add_sequence(1, 4).is_ok());
  const std::vector<int64_t> ids{1, 2, 3};
  PageShortage shortage;
  EXPECT_EQ(tables.reserve(ids, std::vector<int64_t>{1, 4, 8}, &shortage).code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(shortage.request_id, 3);
  EXPECT_EQ(shortage.needed_pages, 2);
  EXPECT_EQ(shortage.free_pages, 1) << "counted after the requests named before it";
  EXPECT_EQ(tables.num_sequences(), 1);
  EXPECT_EQ(tokens_of(tables, 1), 4);
  ASSERT_TRUE(tables.reserve(ids, std::vector<int64_t>{1, 4, 4}).is_ok());
  EXPECT_EQ(tables.allocator().num_free_pages(), 0);
  EXPECT_EQ(pages_of(tables, 1), (std::vector<int32_t>{0, 1}));
  EXPECT_EQ(pages_of(tables, 3), (std::vector<int32_t>{3}));
}

TEST(KvPageTables, RefusesWrongCallsByName) {
  KvPageTables tables(4, 4, 10);
  ASSERT_TRUE(tables.add_sequence(1, 4).is_ok());
  EXPECT_EQ(tables.add_sequence(1, 1).message(), "kv page tables: request 1 exists already");
  EXPECT_EQ(tables.append(2, 1).message(), "kv page tables: append: request 2 is unknown");
  EXPECT_EQ(tables.release(2).message(), "kv page tables: release: request 2 is unknown");
  EXPECT_EQ(tables.append(1, 7).message(),
            "kv page tables: request 1 holds 4 tokens and asks for 7 more; a sequence holds at most 10");
  EXPECT_EQ(tables.append(1, -1).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(tables.append(1, std::numeric_limits<int64_t>::max()).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(tables.reserve(std::vector<int64_t>{7, 7}, std::vector<int64_t>{1, 1}).message(),
            "kv page tables: request 7 appears twice in one batch");
  EXPECT_EQ(tables.reserve(std::vector<int64_t>{7}, std::vector<int64_t>{}).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(KvPageTables::validate(1, 1, 0).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(tables.num_sequences(), 1);
}

TEST(KvPageTables, FillsADenseTableAndLeavesTheRestAlone) {
  KvPageTables tables(8, 4, 12);
  EXPECT_EQ(tables.max_pages_per_sequence(), 3);
  ASSERT_TRUE(tables.add_sequence(1, 5).is_ok());
  ASSERT_TRUE(tables.add_sequence(2, 12).is_ok());
  constexpr int32_t kSentinel = -77;
  std::vector<int32_t> table(3 * 4, kSentinel);  // rows of 4, of which 3 columns belong to the table
  ASSERT_TRUE(tables.fill_page_table(std::vector<int64_t>{2, 1}, table.data(), 3, 4, -1).is_ok());
  EXPECT_EQ(table, (std::vector<int32_t>{2, 3, 4, kSentinel, 0, 1, -1, kSentinel, kSentinel, kSentinel, kSentinel,
                                         kSentinel}));
  std::vector<int32_t> untouched(8, kSentinel);
  EXPECT_EQ(tables.fill_page_table(std::vector<int64_t>{1, 9}, untouched.data(), 3, 3, -1).code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(tables.fill_page_table(std::vector<int64_t>{1, 2}, untouched.data(), 2, 2, -1).message(),
            "kv page tables: page table has 2 columns; request 2 holds 3 pages");
  EXPECT_EQ(untouched, std::vector<int32_t>(8, kSentinel));
}

/// The obvious model: lengths in a map; a page belongs to at most one request.
class NaiveModel {
 public:
  NaiveModel(int64_t num_pages, int64_t page_size, int64_t max_tokens)
      : num_pages_(num_pages), page_size_(page_size), max_tokens_(max_tokens) {}

  [[nodiscard]] int64_t pages_for(int64_t tokens) const { return (tokens + page_size_ - 1) / page_size_; }
  [[nodiscard]] int64_t free_pages() const {
    int64_t used = 0;
    for (const auto& [id, tokens] : lengths) used += pages_for(tokens);
    return num_pages_ - used;
  }
  StatusCode grow(int64_t id, int64_t more, bool must_exist) {
    if (lengths.contains(id) != must_exist) return StatusCode::kInvalidArgument;
    const int64_t past = must_exist ? lengths.at(id) : 0;
    if (past + more > max_tokens_) return StatusCode::kInvalidArgument;
    if (pages_for(past + more) - pages_for(past) > free_pages()) return StatusCode::kResourceExhausted;
    lengths[id] = past + more;
    return StatusCode::kOk;
  }

  std::map<int64_t, int64_t> lengths;

 private:
  int64_t num_pages_, page_size_, max_tokens_;
};

void expect_same(const KvPageTables& tables, const NaiveModel& model) {
  ASSERT_EQ(tables.num_sequences(), static_cast<int64_t>(model.lengths.size()));
  ASSERT_EQ(tables.allocator().num_free_pages(), model.free_pages());
  std::set<int32_t> all;
  for (const auto& [id, tokens] : model.lengths) {
    ASSERT_EQ(tokens_of(tables, id), tokens);
    const std::vector<int32_t> pages = pages_of(tables, id);
    ASSERT_EQ(static_cast<int64_t>(pages.size()), model.pages_for(tokens));
    for (const int32_t page : pages) ASSERT_TRUE(all.insert(page).second) << "page in two requests: " << page;
  }
}

class KvPageTablesRandom : public testing::TestWithParam<int64_t> {};

TEST_P(KvPageTablesRandom, MatchesTheNaiveModel) {
  const int64_t page_size = GetParam();
  constexpr int64_t kPages = 24;
  KvPageTables tables(kPages, page_size, 40);
  NaiveModel model(kPages, page_size, 40);
  std::mt19937_64 random(static_cast<uint64_t>(page_size) * 7919);
  for (int step = 0; step < 6000; ++step) {
    const auto id = static_cast<int64_t>(random() % 9);
    const auto count = static_cast<int64_t>(random() % 12);
    switch (random() % 5) {
      case 0:
        ASSERT_EQ(tables.add_sequence(id, count).code(), model.grow(id, count, false));
        break;
      case 1:
      case 2:
        ASSERT_EQ(tables.append(id, count).code(), model.grow(id, count, true));
        break;
      case 3: {
        const bool valid = model.lengths.contains(id) && model.lengths.at(id) >= count;
        ASSERT_EQ(tables.rewind(id, count).is_ok(), valid);
        if (valid) model.lengths[id] -= count;
        break;
      }
      default:
        ASSERT_EQ(tables.release(id).is_ok(), model.lengths.contains(id));
        model.lengths.erase(id);
    }
    expect_same(tables, model);
    if (HasFatalFailure()) FAIL() << "page size " << page_size << ", step " << step;
  }
}

INSTANTIATE_TEST_SUITE_P(PageSizes, KvPageTablesRandom, testing::Values(1, 3, 4, 16, 64));

}  // namespace
}  // namespace polyop::runtime
