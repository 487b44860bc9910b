#include "polyop/runtime/ragged_batch.h"

#include <algorithm>
#include <limits>
#include <string>

namespace polyop::runtime {
namespace {

Status check_size(const char* name, std::span<const int32_t> array, int64_t wanted) {
  if (static_cast<int64_t>(array.size()) >= wanted) return Status::ok();
  return invalid_argument("ragged batch: " + std::string(name) + " has " + std::to_string(array.size()) +
                          " entries; wanted at least " + std::to_string(wanted));
}

}  // namespace

Status check_ragged_batch(const RaggedBatchLengths& lengths, const RaggedBatchArrays& arrays,
                          RaggedBatchTotals* totals) {
  constexpr int64_t kMaxLength = std::numeric_limits<int32_t>::max();  // the arrays are i32
  const auto num_sequences = static_cast<int64_t>(lengths.query_tokens.size());
  if (lengths.past_tokens.size() != lengths.query_tokens.size()) {
    return invalid_argument("ragged batch: past_tokens has " + std::to_string(lengths.past_tokens.size()) +
                            " entries; query_tokens has " + std::to_string(num_sequences));
  }
  RaggedBatchTotals sums;
  for (size_t i = 0; i < lengths.query_tokens.size(); ++i) {
    const int64_t query = lengths.query_tokens[i];
    const int64_t past = lengths.past_tokens[i];
    if (query < 0 || past < 0 || query > kMaxLength || past > kMaxLength - query ||
        sums.num_tokens > kMaxLength - query) {
      return invalid_argument("ragged batch: sequence " + std::to_string(i) + " has " + std::to_string(query) +
                              " new and " + std::to_string(past) +
                              " past tokens; wanted numbers that are not negative" + " and sums of at most " +
                              std::to_string(kMaxLength));
    }
    sums.num_tokens += query;
    sums.max_kv_length = std::max(sums.max_kv_length, past + query);
  }
  POLYOP_RETURN_IF_ERROR(check_size("query_offsets", arrays.query_offsets, num_sequences + 1));
  POLYOP_RETURN_IF_ERROR(check_size("write_positions", arrays.write_positions, num_sequences));
  POLYOP_RETURN_IF_ERROR(check_size("kv_lengths", arrays.kv_lengths, num_sequences));
  POLYOP_RETURN_IF_ERROR(check_size("logits_rows", arrays.logits_rows, num_sequences));
  POLYOP_RETURN_IF_ERROR(check_size("position_ids", arrays.position_ids, sums.num_tokens));
  *totals = sums;
  return Status::ok();
}

Status fill_ragged_batch(const RaggedBatchLengths& lengths, const RaggedBatchArrays& arrays,
                         RaggedBatchTotals* totals) {
  POLYOP_RETURN_IF_ERROR(check_ragged_batch(lengths, arrays, totals));
  int32_t row = 0;
  arrays.query_offsets[0] = 0;
  for (size_t i = 0; i < lengths.query_tokens.size(); ++i) {
    const auto query = static_cast<int32_t>(lengths.query_tokens[i]);
    const auto past = static_cast<int32_t>(lengths.past_tokens[i]);
    arrays.write_positions[i] = past;
    arrays.kv_lengths[i] = past + query;
    for (int32_t token = 0; token < query; ++token)
      arrays.position_ids[static_cast<size_t>(row + token)] = past + token;
    row += query;
    arrays.query_offsets[i + 1] = row;
    arrays.logits_rows[i] = query > 0 ? row - 1 : -1;
  }
  return Status::ok();
}

}  // namespace polyop::runtime
