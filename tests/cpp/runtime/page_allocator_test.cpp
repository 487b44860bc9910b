#include "polyop/runtime/page_allocator.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <random>
#include <set>
#include <vector>

namespace polyop::runtime {
namespace {

TEST(PageAllocator, GivesPagesInOrderAndReusesTheLastFreed) {
  PageAllocator allocator(4, 16);
  int32_t page = -1;
  for (int32_t wanted = 0; wanted < 4; ++wanted) {
    ASSERT_TRUE(allocator.allocate(&page).is_ok());
    EXPECT_EQ(page, wanted);
  }
  EXPECT_EQ(allocator.allocate(&page).code(), StatusCode::kResourceExhausted);
  EXPECT_EQ(page, 3) << "a failed call must not write its output";
  ASSERT_TRUE(allocator.free(1).is_ok());
  ASSERT_TRUE(allocator.free(2).is_ok());
  ASSERT_TRUE(allocator.allocate(&page).is_ok());
  EXPECT_EQ(page, 2);
  ASSERT_TRUE(allocator.allocate(&page).is_ok());
  EXPECT_EQ(page, 1);
}

TEST(PageAllocator, RefusesDoubleFreeAndForeignPages) {
  PageAllocator allocator(2, 1);
  int32_t page = -1;
  ASSERT_TRUE(allocator.allocate(&page).is_ok());
  ASSERT_TRUE(allocator.free(page).is_ok());
  const Status twice = allocator.free(page);
  EXPECT_EQ(twice.code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(twice.message(), "page allocator: page 0 is free already");
  EXPECT_EQ(allocator.free(2).message(), "page allocator: page to free is 2; wanted 0 to 1");
  EXPECT_EQ(allocator.free(-1).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(allocator.num_free_pages(), 2);
}

TEST(PageAllocator, RoundsTokensUpToPagesWithoutOverflow) {
  const PageAllocator allocator(1, 3);  // a page size that is no power of two
  EXPECT_EQ(allocator.pages_for_tokens(0), 0);
  EXPECT_EQ(allocator.pages_for_tokens(1), 1);
  EXPECT_EQ(allocator.pages_for_tokens(3), 1);
  EXPECT_EQ(allocator.pages_for_tokens(4), 2);
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  EXPECT_EQ(allocator.pages_for_tokens(kMax), kMax / 3 + 1);
}

TEST(PageAllocator, ValidatesItsArguments) {
  EXPECT_TRUE(PageAllocator::validate(0, 1).is_ok());
  EXPECT_EQ(PageAllocator::validate(-1, 1).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(PageAllocator::validate(int64_t{1} << 31, 1).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(PageAllocator::validate(1, 0).message(), "page allocator: page_size is 0; wanted at least 1");
}

TEST(PageAllocator, RandomOperationsMatchASet) {
  std::mt19937_64 random(20260611);
  PageAllocator allocator(37, 8);
  std::set<int32_t> held;
  for (int step = 0; step < 20000; ++step) {
    if (random() % 2 == 0) {
      int32_t page = -1;
      const bool expected = held.size() < 37;
      ASSERT_EQ(allocator.allocate(&page).is_ok(), expected);
      if (expected) {
        ASSERT_TRUE(held.insert(page).second) << "page given twice: " << page;
      }
    } else {
      const auto page = static_cast<int32_t>(random() % 40);
      ASSERT_EQ(allocator.free(page).is_ok(), held.erase(page) == 1);
    }
    ASSERT_EQ(allocator.num_free_pages(), 37 - static_cast<int64_t>(held.size()));
  }
  for (int32_t page = 0; page < 37; ++page) EXPECT_EQ(allocator.is_allocated(page), held.contains(page));
}

}  // namespace
}  // namespace polyop::runtime
