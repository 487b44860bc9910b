// One call of kv_cache_update with everything it needs: what the tests of this operator share.
#pragma once

#include <algorithm>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "tests/cpp/testing/call_kernel.h"
#include "tests/cpp/testing/guarded_tensor.h"

namespace polyop::testing {

struct KvCacheCase {
  bool is_paged = true;
  bool is_packed = true;
  bool has_values = true;
  bool has_write_positions = true;
  int64_t page_size = 16;  // R, paged
  int64_t capacity = 48;   // W * R or Lmax
  int64_t num_kv_heads = 2;
  int64_t head_dim = 8;
  int64_t scales = 0;                     // length of the scales; 0: absent
  bool strided = false;                   // gaps in k, v and the caches
  std::vector<int64_t> new_tokens = {3};  // by sequence; all equal when padded
  std::vector<int64_t> starts = {0};      // by sequence
  DType cache_dtype = DType::kF16;
  DType update_dtype = DType::kF16;

  [[nodiscard]] std::string text() const {
    std::string result = std::string(is_paged ? "paged R " + std::to_string(page_size) : "linear") +
                         (is_packed ? " packed" : " padded") + (strided ? " strided" : "") + " " +
                         std::string(dtype_name(update_dtype)) + " to " + std::string(dtype_name(cache_dtype)) +
                         ", Hkv " + std::to_string(num_kv_heads) + " D " + std::to_string(head_dim) + ", tokens";
    for (size_t b = 0; b < new_tokens.size(); ++b) {
      result += " " + std::to_string(starts[b]) + "+" + std::to_string(new_tokens[b]);
    }
    return result;
  }
};

/// The tensors of one case. The caches hold random bits; page ids of pages that are not written to are garbage.
struct KvCacheTensors {
  GuardedTensor k_cache;
  GuardedTensor v_cache;
  GuardedTensor k;
  GuardedTensor v;
  GuardedTensor update_offsets;
  GuardedTensor write_positions;
  GuardedTensor page_table;
  GuardedTensor k_scale;
  GuardedTensor v_scale;

  [[nodiscard]] Call call(const KvCacheCase& c) {
    Call call{"kv_cache_update",
              {{"k_cache", k_cache}, {"k", k}},
              {{"cache_form", AttributeValue::of_text(c.is_paged ? "paged" : "linear")},
               {"update_form", AttributeValue::of_text(c.is_packed ? "packed" : "padded")}}};
    if (c.has_values) call.operands.insert(call.operands.end(), {{"v_cache", v_cache}, {"v", v}});
    if (c.is_packed) call.operands.push_back({"update_offsets", update_offsets});
    if (c.has_write_positions) call.operands.push_back({"write_positions", write_positions});
    if (c.is_paged) call.operands.push_back({"page_table", page_table});
    if (c.scales > 0) call.operands.push_back({"k_scale", k_scale});
    if (c.scales > 0 && c.has_values) call.operands.push_back({"v_scale", v_scale});
    return call;
  }
};

inline KvCacheTensors make_kv_cache_tensors(const KvCacheCase& c, std::mt19937& random) {
  const auto num_sequences = static_cast<int64_t>(c.new_tokens.size());
  const int64_t total = std::accumulate(c.new_tokens.begin(), c.new_tokens.end(), int64_t{0});
  const int64_t columns = c.is_paged ? c.capacity / c.page_size : 0;
  const int64_t num_pages = num_sequences * columns + 1;
  const int64_t padded_tokens = num_sequences == 0 ? 4 : c.new_tokens[0];
  const auto cache = [&] {
    const std::vector<int64_t> shape =
        c.is_paged ? std::vector<int64_t>{num_pages, c.page_size, c.num_kv_heads, c.head_dim}
                   : std::vector<int64_t>{num_sequences, c.num_kv_heads, c.capacity, c.head_dim};
    return GuardedTensor(c.cache_dtype, shape, c.strided ? std::vector<int64_t>{0, 2, 1, 3} : std::vector<int64_t>{})
        .fill_bits(random);
  };
  const auto update = [&] {
    // Two more rows than the offsets cover when packed: nobody may read them into the cache.
    const std::vector<int64_t> shape =
        c.is_packed ? std::vector<int64_t>{total + 2, c.num_kv_heads, c.head_dim}
                    : std::vector<int64_t>{num_sequences, padded_tokens, c.num_kv_heads, c.head_dim};
    const std::vector<int64_t> gaps = c.is_packed ? std::vector<int64_t>{0, 4, 0} : std::vector<int64_t>{0, 1, 2, 0};
    return GuardedTensor(c.update_dtype, shape, c.strided ? gaps : std::vector<int64_t>{}).fill_bits(random);
  };
  const auto scale = [&] {
    GuardedTensor tensor(DType::kF32, {std::max<int64_t>(c.scales, 1)});
    for (int64_t i = 0; i < tensor.size(); ++i) tensor.at<float>(i) = 0.01f * static_cast<float>(1 + random() % 300);
    return tensor;
  };
  KvCacheTensors tensors{cache(),
                         cache(),
                         update(),
                         update(),
                         GuardedTensor(DType::kI32, {num_sequences + 1}),
                         GuardedTensor(DType::kI32, {num_sequences}),
                         GuardedTensor(DType::kI32, {num_sequences, columns}, {0, 1}),
                         scale(),
                         scale()};
  std::vector<int32_t> page_ids(static_cast<size_t>(num_pages));
  std::iota(page_ids.begin(), page_ids.end(), 0);
  std::shuffle(page_ids.begin(), page_ids.end(), random);
  int64_t offset = 0;
  size_t next_page = 0;
  for (int64_t b = 0; b < num_sequences; ++b) {
    const int64_t start = c.starts[static_cast<size_t>(b)];
    const int64_t tokens = c.new_tokens[static_cast<size_t>(b)];
    tensors.update_offsets.at<int32_t>(b) = static_cast<int32_t>(offset);
    tensors.write_positions.at<int32_t>(b) = static_cast<int32_t>(start);
    offset += tokens;
    for (int64_t column = 0; column < columns; ++column) {
      const bool is_written = tokens > 0 && column >= start / c.page_size && column * c.page_size < start + tokens;
      tensors.page_table.at<int32_t>({b, column}) = is_written ? page_ids[next_page++] : -12345;
    }
  }
  tensors.update_offsets.at<int32_t>(num_sequences) = static_cast<int32_t>(offset);
  return tensors;
}

}  // namespace polyop::testing
