// kv_cache_update: what is refused, with which words, and that a refused call writes nothing.
#include <gtest/gtest.h>

#include "tests/cpp/ops/kv_cache_update/kv_cache_case.h"

namespace polyop {
namespace {

using testing::Call;
using testing::GuardedTensor;
using testing::KvCacheCase;
using testing::KvCacheTensors;
using testing::make_kv_cache_tensors;

class KvCacheUpdateRefusals : public ::testing::Test {
 protected:
  KvCacheCase packed_paged{.page_size = 4, .capacity = 12, .new_tokens = {3, 2}, .starts = {1, 10}};
  std::mt19937 random{7};
  KvCacheTensors tensors = make_kv_cache_tensors(packed_paged, random);

  /// The text of the refusal; no byte of the caches may have changed.
  std::string refuse(const Call& call) {
    const std::vector<uint8_t> k_before = tensors.k_cache.memory();
    const std::vector<uint8_t> v_before = tensors.v_cache.memory();
    const std::string text = testing::refusal(call);
    EXPECT_TRUE(tensors.k_cache.memory() == k_before && tensors.v_cache.memory() == v_before)
        << "something was written";
    return text;
  }
  std::string refuse() { return refuse(tensors.call(packed_paged)); }
  std::string refuse(const KvCacheCase& c) {
    tensors = make_kv_cache_tensors(c, random);
    return refuse(tensors.call(c));
  }
  /// The packed, paged call with operand `name` replaced, added, or (null) taken away.
  Call with(std::string_view name, const TensorView* tensor) {
    Call call = tensors.call(packed_paged);
    std::erase_if(call.operands, [&](const NamedTensor& operand) { return operand.name == name; });
    if (tensor != nullptr) call.operands.push_back({name, *tensor});
    return call;
  }
};

TEST_F(KvCacheUpdateRefusals, SequenceThatDoesNotFit) {
  tensors.write_positions.fill<int32_t>({1, 11});
  EXPECT_EQ(refuse(),
            "kv_cache_update: update_offsets at b = 1: write_positions[b] + update_offsets[b + 1] - update_offsets[b] "
            "= 13 is more than W * R = 12");
  tensors.write_positions.fill<int32_t>({1, 13});
  EXPECT_EQ(refuse(), "kv_cache_update: write_positions[1] is 13, wanted 0 to 12 (outside the range)");
  tensors.write_positions.fill<int32_t>({-1, 10});
  EXPECT_EQ(refuse(), "kv_cache_update: write_positions[0] is -1, wanted 0 to 12 (outside the range)");

  EXPECT_EQ(refuse({.is_paged = false, .capacity = 9, .new_tokens = {1, 4}, .starts = {0, 6}}),
            "kv_cache_update: update_offsets at b = 1: write_positions[b] + update_offsets[b + 1] - update_offsets[b] "
            "= 10 is more than Lmax = 9");
  EXPECT_EQ(refuse({.is_paged = false, .has_write_positions = false, .capacity = 9, .new_tokens = {10}, .starts = {0}}),
            "kv_cache_update: update_offsets at b = 0: write_positions[b] + update_offsets[b + 1] - update_offsets[b] "
            "= 10 is more than Lmax = 9");
  EXPECT_EQ(refuse({.is_paged = false, .is_packed = false, .capacity = 9, .new_tokens = {4, 4}, .starts = {5, 6}}),
            "kv_cache_update: write_positions at b = 1: write_positions[b] + S = 10 is more than Lmax = 9");
  EXPECT_EQ(refuse({.is_packed = false, .page_size = 3, .capacity = 9, .new_tokens = {4, 4}, .starts = {5, 6}}),
            "kv_cache_update: write_positions at b = 1: write_positions[b] + S = 10 is more than W * R = 9");
  EXPECT_EQ(refuse({.is_paged = false,
                    .is_packed = false,
                    .has_write_positions = false,
                    .capacity = 9,
                    .new_tokens = {10},
                    .starts = {0}}),
            "kv_cache_update: k axis 1 is 10; S = 10 is more than Lmax = 9");
  EXPECT_EQ(refuse({.is_packed = false,
                    .has_write_positions = false,
                    .page_size = 3,
                    .capacity = 9,
                    .new_tokens = {10},
                    .starts = {0}}),
            "kv_cache_update: k axis 1 is 10; S = 10 is more than W * R = 9");
}

TEST_F(KvCacheUpdateRefusals, PageIdsAndOffsets) {
  tensors.page_table.at<int32_t>({1, 2}) = 7;  // seven pages: 0 to 6
  EXPECT_EQ(refuse(), "kv_cache_update: page_table[1, 2] is 7, wanted 0 to 6 (outside the range)");
  tensors.page_table.at<int32_t>({1, 2}) = -1;
  EXPECT_EQ(refuse(), "kv_cache_update: page_table[1, 2] is -1, wanted 0 to 6 (outside the range)");
  tensors.page_table.at<int32_t>({1, 2}) = 0;
  tensors.update_offsets.fill<int32_t>({1, 3, 5});
  EXPECT_EQ(refuse(), "kv_cache_update: update_offsets[0] is 1, wanted 0 to 7 (the first offset must be 0)");
  tensors.update_offsets.fill<int32_t>({0, 3, 2});
  EXPECT_EQ(refuse(), "kv_cache_update: update_offsets[2] is 2, wanted 0 to 7 (offsets must not decrease)");
  tensors.update_offsets.fill<int32_t>({0, 3, 8});
  EXPECT_EQ(refuse(), "kv_cache_update: update_offsets[2] is 8, wanted 0 to 7 (outside the range)");
}

TEST_F(KvCacheUpdateRefusals, MissingAndForeignOperands) {
  EXPECT_EQ(refuse(with("page_table", nullptr)),
            "kv_cache_update: page_table is missing; it is required when cache_form = paged");
  EXPECT_EQ(refuse(with("update_offsets", nullptr)),
            "kv_cache_update: update_offsets is missing; it is required when update_form = packed");
  EXPECT_EQ(refuse(with("v", nullptr)), "kv_cache_update: v is missing beside v_cache");
  EXPECT_EQ(refuse(with("v_cache", nullptr)), "kv_cache_update: v is given without v_cache");
  const TensorView scale = tensors.k_scale;
  EXPECT_EQ(refuse(with("k_scale", &scale)),
            "kv_cache_update: k_scale is given, but belongs only to a cache of f8e4m3 or i8; k_cache is f16");
  KvCacheCase linear{.is_paged = false};
  tensors = make_kv_cache_tensors(linear, random);
  Call call = tensors.call(linear);
  GuardedTensor table(DType::kI32, {1, 1});
  call.operands.push_back({"page_table", table});
  EXPECT_EQ(refuse(call), "kv_cache_update: page_table is given, but belongs only to cache_form = paged");
  KvCacheCase keys_only{.has_values = false, .scales = 1, .cache_dtype = DType::kI8};
  tensors = make_kv_cache_tensors(keys_only, random);
  call = tensors.call(keys_only);
  call.operands.push_back({"v_scale", tensors.v_scale});
  EXPECT_EQ(refuse(call), "kv_cache_update: v_scale is given without v_cache");
}

TEST_F(KvCacheUpdateRefusals, DtypesAndShapes) {
  GuardedTensor f32_keys(DType::kF32, {7, 2, 8});
  const TensorView f32_view = f32_keys;
  Call call = with("k", &f32_view);
  EXPECT_EQ(refuse(call), "kv_cache_update: v is f16, wanted f32 as k");
  std::erase_if(call.operands, [](const NamedTensor& operand) { return operand.name == "v"; });
  call.operands.push_back({"v", f32_view});
  EXPECT_EQ(refuse(call), "kv_cache_update: k is f32, wanted f16 as k_cache");
  GuardedTensor i8_cache(DType::kI8, {7, 4, 2, 8});
  const TensorView i8_view = i8_cache;
  EXPECT_EQ(refuse(with("v_cache", &i8_view)), "kv_cache_update: v_cache is i8, wanted f16 as k_cache");
  GuardedTensor wide(DType::kF16, {7, 3, 8});
  const TensorView wide_view = wide;
  EXPECT_EQ(refuse(with("v", &wide_view)), "kv_cache_update: v axis 1 (Hkv) is 3, wanted 2 as in k_cache axis 2");
  GuardedTensor three(DType::kI32, {3});
  const TensorView three_view = three;
  EXPECT_EQ(refuse(with("write_positions", &three_view)),
            "kv_cache_update: page_table axis 0 (B) is 2, wanted 3 as in write_positions axis 0");
  GuardedTensor two(DType::kI32, {2});
  const TensorView two_view = two;
  EXPECT_EQ(refuse(with("update_offsets", &two_view)), "kv_cache_update: update_offsets axis 0 (B + 1) is 2, wanted 3");
  KvCacheCase scaled{.num_kv_heads = 3, .scales = 2, .cache_dtype = DType::kF8E4M3};
  EXPECT_EQ(refuse(scaled), "kv_cache_update: k_scale axis 0 (Hkv) is 2, wanted 3 or 1");
  Call wrong_form = with("x", nullptr);
  wrong_form.attributes = {{"cache_form", AttributeValue::of_text("ring")}};
  EXPECT_EQ(refuse(wrong_form), "kv_cache_update: attribute cache_form is \"ring\", wanted paged or linear");
}

TEST_F(KvCacheUpdateRefusals, SharedMemory) {
  const TensorView k_cache = tensors.k_cache;
  EXPECT_EQ(refuse(with("v_cache", &k_cache)), "kv_cache_update: k_cache is written and shares memory with v_cache");
  TensorView broadcast = tensors.k_cache;
  broadcast.strides[0] = 0;
  EXPECT_EQ(refuse(with("k_cache", &broadcast)),
            "kv_cache_update: k_cache is written and overlaps itself: two indices share one element");
}

}  // namespace
}  // namespace polyop
