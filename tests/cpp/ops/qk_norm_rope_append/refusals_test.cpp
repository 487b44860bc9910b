// qk_norm_rope_append: what is refused, with which words, and that a refused call writes nothing.
#include <gtest/gtest.h>

#include "tests/cpp/ops/qk_norm_rope_append/append_case.h"

namespace polyop {
namespace {

using testing::AppendCase;
using testing::AppendTensors;
using testing::Call;
using testing::GuardedTensor;
using testing::make_append_tensors;

class QkNormRopeAppendRefusals : public ::testing::Test {
 protected:
  AppendCase base{.cache = {.page_size = 4, .capacity = 12, .new_tokens = {3, 2}, .starts = {1, 10}}, .has_norm = true};
  std::mt19937 random{7};
  AppendTensors tensors = make_append_tensors(base, random);

  std::string refuse(const Call& call) {
    const AppendTensors before = tensors;
    const std::string text = testing::refusal(call);
    EXPECT_TRUE(tensors.kv.k_cache.memory() == before.kv.k_cache.memory()) << "k_cache was written";
    EXPECT_TRUE(tensors.kv.v_cache.memory() == before.kv.v_cache.memory()) << "v_cache was written";
    EXPECT_TRUE(tensors.q_out.memory() == before.q_out.memory()) << "q_out was written";
    return text;
  }
  std::string refuse() { return refuse(tensors.call(base)); }
  /// The call with operand `name` replaced, added, or (null) taken away.
  Call with(std::string_view name, const TensorView* tensor) {
    Call call = tensors.call(base);
    std::erase_if(call.operands, [&](const NamedTensor& operand) { return operand.name == name; });
    if (tensor != nullptr) call.operands.push_back({name, *tensor});
    return call;
  }
};

TEST_F(QkNormRopeAppendRefusals, Positions) {
  tensors.position_ids.at<int32_t>(2) = 12;
  EXPECT_EQ(refuse(), "qk_norm_rope_append: position_ids[2] is 12, wanted -1 to 11 (outside the range)");
  tensors.position_ids.at<int32_t>(2) = -2;
  EXPECT_EQ(refuse(), "qk_norm_rope_append: position_ids[2] is -2, wanted -1 to 11 (outside the range)");
  GuardedTensor few(DType::kF32, {11, 8});
  const TensorView few_view = few;
  base.has_position_ids = false;
  EXPECT_EQ(refuse(with("cos_sin", &few_view)),
            "qk_norm_rope_append: cos_sin axis 0 (Lrot) is 11, wanted at least 12: without position_ids the tokens of "
            "sequence 1 have their cache positions");
  tensors.kv.write_positions.fill<int32_t>({1, 11});
  EXPECT_EQ(refuse(),
            "qk_norm_rope_append: update_offsets at b = 1: write_positions[b] + update_offsets[b + 1] - "
            "update_offsets[b] = 13 is more than W * R = 12");
}

TEST_F(QkNormRopeAppendRefusals, PageIdsAndOffsets) {
  tensors.kv.page_table.at<int32_t>({1, 2}) = -1;
  EXPECT_EQ(refuse(), "qk_norm_rope_append: page_table[1, 2] is -1, wanted 0 to 6 (outside the range)");
  tensors.kv.page_table.at<int32_t>({1, 2}) = 0;
  tensors.kv.update_offsets.fill<int32_t>({0, 3, 2});
  EXPECT_EQ(refuse(), "qk_norm_rope_append: update_offsets[2] is 2, wanted 0 to 7 (offsets must not decrease)");
}

TEST_F(QkNormRopeAppendRefusals, MissingAndForeignOperands) {
  EXPECT_EQ(refuse(with("k_norm_weight", nullptr)),
            "qk_norm_rope_append: k_norm_weight is missing beside q_norm_weight");
  EXPECT_EQ(refuse(with("q_norm_weight", nullptr)),
            "qk_norm_rope_append: k_norm_weight is given without q_norm_weight");
  EXPECT_EQ(refuse(with("cos_sin", nullptr)), "qk_norm_rope_append: cos_sin is missing");
  EXPECT_EQ(refuse(with("page_table", nullptr)),
            "qk_norm_rope_append: page_table is missing; it is required when cache_form = paged");
  const TensorView scale = tensors.kv.k_scale;
  EXPECT_EQ(refuse(with("v_scale", &scale)),
            "qk_norm_rope_append: v_scale is given, but belongs only to a cache of f8e4m3 or i8; k_cache is f16");
}

TEST_F(QkNormRopeAppendRefusals, DtypesShapesAndAttributes) {
  GuardedTensor bf16_cache(DType::kBF16, {7, 4, 2, 8});
  const TensorView bf16_view = bf16_cache;
  Call call = with("k_cache", &bf16_view);
  std::erase_if(call.operands, [](const NamedTensor& operand) { return operand.name == "v_cache"; });
  GuardedTensor other_cache(DType::kBF16, {7, 4, 2, 8});
  call.operands.push_back({"v_cache", other_cache});
  EXPECT_EQ(refuse(call), "qk_norm_rope_append: k_cache is bf16, wanted f8e4m3 or i8 or f16 as q");
  GuardedTensor odd(DType::kF32, {12, 7});
  const TensorView odd_view = odd;
  EXPECT_EQ(refuse(with("cos_sin", &odd_view)),
            "qk_norm_rope_append: cos_sin axis 1 is 7; Drot = 7 is no multiple of 2");
  GuardedTensor wide(DType::kF32, {12, 10});
  const TensorView wide_view = wide;
  EXPECT_EQ(refuse(with("cos_sin", &wide_view)),
            "qk_norm_rope_append: cos_sin axis 1 is 10; Drot = 10 is more than D = 8");
  GuardedTensor weight(DType::kBF16, {8});
  const TensorView weight_view = weight;
  EXPECT_EQ(refuse(with("q_norm_weight", &weight_view)),
            "qk_norm_rope_append: q_norm_weight is bf16, wanted f32 or f16 as q");
  call = tensors.call(base);
  call.attributes.back().value = AttributeValue::of_float(-1.0);
  EXPECT_EQ(refuse(call), "qk_norm_rope_append: attribute epsilon is -1.000000, wanted at least 0");
}

TEST_F(QkNormRopeAppendRefusals, SharedMemory) {
  const TensorView q = tensors.q;
  TensorView shifted = q;
  shifted.shape[0] -= 1;
  shifted.data = static_cast<char*>(shifted.data) + q.strides[0] * 2;
  Call call = with("q_out", &shifted);
  for (NamedTensor& operand : call.operands) {
    const bool is_token =
        operand.name == "q" || operand.name == "k" || operand.name == "v" || operand.name == "position_ids";
    if (is_token) operand.tensor.shape[0] -= 1;
  }
  EXPECT_EQ(refuse(call), "qk_norm_rope_append: q_out is written and shares memory with q");
  const TensorView k_cache = tensors.kv.k_cache;
  EXPECT_EQ(refuse(with("v_cache", &k_cache)),
            "qk_norm_rope_append: k_cache is written and shares memory with v_cache");
  AppendCase equal_heads = base;
  equal_heads.num_query_heads = 2;
  AppendTensors equal = make_append_tensors(equal_heads, random);
  call = equal.call(equal_heads);
  const TensorView k = equal.kv.k;
  std::erase_if(call.operands, [](const NamedTensor& operand) { return operand.name == "q_out"; });
  call.operands.push_back({"q_out", k});
  EXPECT_EQ(testing::refusal(call), "qk_norm_rope_append: q_out is written and shares memory with k");
}

}  // namespace
}  // namespace polyop
