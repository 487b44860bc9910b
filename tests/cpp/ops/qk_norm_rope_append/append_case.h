// One call of qk_norm_rope_append with everything it needs: what the tests of this operator share.
#pragma once

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "tests/cpp/ops/kv_cache_update/kv_cache_case.h"

namespace polyop::testing {

struct AppendCase {
  KvCacheCase cache;  // packed; the dtype of q, k and v is its update_dtype
  int64_t num_query_heads = 4;
  int64_t rotary_dim = 8;
  bool interleaved = false;
  bool has_position_ids = true;
  bool has_norm = false;
  DType weight_dtype = DType::kF32;
  bool in_place = false;  // q_out is q

  [[nodiscard]] std::string text() const {
    return cache.text() + " Hq " + std::to_string(num_query_heads) + " Drot " + std::to_string(rotary_dim) +
           (interleaved ? " interleaved" : "") + (has_position_ids ? " ids" : "") + (has_norm ? " norm" : "") +
           (in_place ? " in place" : "");
  }
};

/// The tensors of one case: k and v have two rows more than update_offsets covers, and so have q and q_out.
struct AppendTensors {
  KvCacheTensors kv;
  GuardedTensor q;
  GuardedTensor q_out;
  GuardedTensor cos_sin;
  GuardedTensor position_ids;
  GuardedTensor q_norm_weight;
  GuardedTensor k_norm_weight;

  [[nodiscard]] Call call(const AppendCase& c) {
    Call call{"qk_norm_rope_append",
              {{"q", q},
               {"k", kv.k},
               {"v", kv.v},
               {"k_cache", kv.k_cache},
               {"v_cache", kv.v_cache},
               {"cos_sin", cos_sin},
               {"update_offsets", kv.update_offsets},
               {"q_out", c.in_place ? q : q_out}},
              {{"cache_form", AttributeValue::of_text(c.cache.is_paged ? "paged" : "linear")},
               {"interleaved", AttributeValue::of_bool(c.interleaved)},
               {"epsilon", AttributeValue::of_float(kEpsilon)}}};
    if (c.cache.has_write_positions) call.operands.push_back({"write_positions", kv.write_positions});
    if (c.cache.is_paged) call.operands.push_back({"page_table", kv.page_table});
    if (c.has_position_ids) call.operands.push_back({"position_ids", position_ids});
    if (c.has_norm) {
      call.operands.insert(call.operands.end(), {{"q_norm_weight", q_norm_weight}, {"k_norm_weight", k_norm_weight}});
    }
    if (c.cache.scales > 0) {
      call.operands.insert(call.operands.end(), {{"k_scale", kv.k_scale}, {"v_scale", kv.v_scale}});
    }
    return call;
  }

  static constexpr double kEpsilon = 1e-5;
};

/// Rows of cosines and sines of arbitrary angles, one for each position a cache of this capacity can have.
inline GuardedTensor make_angles(int64_t positions, int64_t rotary_dim, std::mt19937& random) {
  GuardedTensor table(DType::kF32, {positions, rotary_dim}, {0, 3});
  std::uniform_real_distribution<double> angle(-4.0, 4.0);
  for (int64_t row = 0; row < positions; ++row) {
    for (int64_t pair = 0; pair < rotary_dim / 2; ++pair) {
      const double a = angle(random);
      table.at<float>({row, pair}) = static_cast<float>(std::cos(a));
      table.at<float>({row, pair + rotary_dim / 2}) = static_cast<float>(std::sin(a));
    }
  }
  return table;
}

inline AppendTensors make_append_tensors(const AppendCase& c, std::mt19937& random) {
  KvCacheTensors kv = make_kv_cache_tensors(c.cache, random);
  const int64_t rows = kv.k.view().shape[0];
  const std::vector<int64_t> q_shape = {rows, c.num_query_heads, c.cache.head_dim};
  const int64_t positions = std::max<int64_t>(c.cache.capacity, 1);
  const auto heads = [&](std::vector<int64_t> gaps) {
    return GuardedTensor(c.cache.update_dtype, q_shape, c.cache.strided ? std::move(gaps) : std::vector<int64_t>{});
  };
  AppendTensors tensors{std::move(kv),
                        heads({0, 2, 1}).fill_bits(random),
                        heads({0, 1, 3}),
                        make_angles(positions, c.rotary_dim, random),
                        GuardedTensor(DType::kI32, {rows}),
                        GuardedTensor(c.weight_dtype, {c.cache.head_dim}).fill_floats(random, 2.0f),
                        GuardedTensor(c.weight_dtype, {c.cache.head_dim}).fill_floats(random, 2.0f)};
  for (int64_t t = 0; t < rows; ++t) {
    tensors.position_ids.at<int32_t>(t) = static_cast<int32_t>(random() % static_cast<uint64_t>(positions));
  }
  return tensors;
}

}  // namespace polyop::testing
