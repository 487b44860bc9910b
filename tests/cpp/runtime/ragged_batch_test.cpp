#include "polyop/runtime/ragged_batch.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

namespace polyop::runtime {
namespace {

constexpr int32_t kSentinel = -77;

/// Arrays for a batch with one sentinel behind each.
struct Arrays {
  Arrays(size_t num_sequences, size_t num_tokens)
      : query_offsets(num_sequences + 2, kSentinel),
        write_positions(num_sequences + 1, kSentinel),
        kv_lengths(num_sequences + 1, kSentinel),
        logits_rows(num_sequences + 1, kSentinel),
        position_ids(num_tokens + 1, kSentinel) {}

  RaggedBatchArrays spans() { return {query_offsets, write_positions, kv_lengths, logits_rows, position_ids}; }

  std::vector<int32_t> query_offsets, write_positions, kv_lengths, logits_rows, position_ids;
};

TEST(RaggedBatch, DescribesContextsGenerationsAndEmptySequences) {
  const std::vector<int64_t> query{3, 0, 1}, past{0, 9, 62};
  Arrays arrays(3, 4);
  RaggedBatchTotals totals;
  ASSERT_TRUE(fill_ragged_batch({query, past}, arrays.spans(), &totals).is_ok());
  EXPECT_EQ(arrays.query_offsets, (std::vector<int32_t>{0, 3, 3, 4, kSentinel}));
  EXPECT_EQ(arrays.write_positions, (std::vector<int32_t>{0, 9, 62, kSentinel}));
  EXPECT_EQ(arrays.kv_lengths, (std::vector<int32_t>{3, 9, 63, kSentinel}));
  EXPECT_EQ(arrays.logits_rows, (std::vector<int32_t>{2, -1, 3, kSentinel}));
  EXPECT_EQ(arrays.position_ids, (std::vector<int32_t>{0, 1, 2, 62, kSentinel}));
  EXPECT_EQ(totals.num_tokens, 4);
  EXPECT_EQ(totals.max_kv_length, 63);
}

TEST(RaggedBatch, EmptyBatchHasOneOffset) {
  Arrays arrays(0, 0);
  RaggedBatchTotals totals;
  ASSERT_TRUE(fill_ragged_batch({}, arrays.spans(), &totals).is_ok());
  EXPECT_EQ(arrays.query_offsets, (std::vector<int32_t>{0, kSentinel}));
  EXPECT_EQ(totals.num_tokens, 0);
}

TEST(RaggedBatch, RefusedBatchLeavesTheArraysUntouched) {
  const std::vector<int64_t> one{1}, two{1, 1};
  Arrays arrays(1, 1);
  const Arrays before = arrays;
  RaggedBatchTotals totals;
  const auto refused = [&](const std::vector<int64_t>& query, const std::vector<int64_t>& past) {
    const Status status = fill_ragged_batch({query, past}, arrays.spans(), &totals);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    return status.message();
  };
  EXPECT_EQ(refused(two, one), "ragged batch: past_tokens has 1 entries; query_tokens has 2");
  EXPECT_EQ(refused({1, 1, 1}, {0, 0, 0}), "ragged batch: query_offsets has 3 entries; wanted at least 4");
  EXPECT_EQ(refused({3}, {0}), "ragged batch: position_ids has 2 entries; wanted at least 3");
  refused({-1}, {0});
  refused({0}, {-1});
  refused({1}, {std::numeric_limits<int32_t>::max()});
  refused({std::numeric_limits<int64_t>::max()}, {0});
  refused({int64_t{1} << 30, int64_t{1} << 30}, {0, 0});
  EXPECT_EQ(arrays.query_offsets, before.query_offsets);
  EXPECT_EQ(arrays.kv_lengths, before.kv_lengths);
  EXPECT_EQ(arrays.position_ids, before.position_ids);
}

TEST(RaggedBatch, RandomBatchesMatchTheDefinition) {
  std::mt19937_64 random(424242);
  for (int round = 0; round < 300; ++round) {
    const size_t num_sequences = random() % 7;
    std::vector<int64_t> query(num_sequences), past(num_sequences);
    for (auto& n : query) n = static_cast<int64_t>(random() % 5);
    for (auto& n : past) n = static_cast<int64_t>(random() % 100);
    const int64_t num_tokens = std::accumulate(query.begin(), query.end(), int64_t{0});
    Arrays arrays(num_sequences, static_cast<size_t>(num_tokens));
    RaggedBatchTotals totals;
    ASSERT_TRUE(fill_ragged_batch({query, past}, arrays.spans(), &totals).is_ok());
    ASSERT_EQ(totals.num_tokens, num_tokens);
    size_t token = 0;
    for (size_t i = 0; i < num_sequences; ++i) {
      ASSERT_EQ(arrays.query_offsets[i], static_cast<int32_t>(token));
      ASSERT_EQ(arrays.kv_lengths[i], past[i] + query[i]);
      for (int64_t j = 0; j < query[i]; ++j) ASSERT_EQ(arrays.position_ids[token++], past[i] + j);
      ASSERT_EQ(arrays.logits_rows[i], query[i] == 0 ? -1 : static_cast<int32_t>(token) - 1);
    }
    ASSERT_EQ(arrays.query_offsets[num_sequences], num_tokens);
    ASSERT_EQ(arrays.position_ids[token], kSentinel);
  }
}

}  // namespace
}  // namespace polyop::runtime
