// The TensorRT fronts as plain C++ sees them: layouts, scale and refusals. Numbers over shapes and dtypes are in
// tests/python/onnx, where files with these nodes run.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "polyop/core/call.h"
#include "polyop/ops/operators.h"

namespace polyop {
namespace {

TensorView view(std::vector<float>& data, std::initializer_list<int64_t> shape) {
  return TensorView::contiguous(data.data(), DType::kF32, shape);
}

TEST(TrtAttention_Cpu, Padded_HeadsStandBeforeRowsAndNothingIsScaled) {
  // Two heads of one key dimension; head 1 sees keys 0 and ln 3: weights 1/4 and 3/4.
  std::vector<float> q = {0.0f, 1.0f};
  std::vector<float> k = {0.0f, 0.0f, 0.0f, std::log(3.0f)};
  std::vector<float> v = {2.0f, 4.0f, 0.0f, 8.0f};
  std::vector<float> y(2);
  const Operator* op = operators().find("trt_attention");
  ASSERT_NE(op, nullptr);
  const Status status = call_operator(*op, {{"Q", view(q, {1, 2, 1, 1})},
                                            {"K", view(k, {1, 2, 2, 1})},
                                            {"V", view(v, {1, 2, 2, 1})},
                                            {"Y", view(y, {1, 2, 1, 1})}});
  ASSERT_TRUE(status.is_ok()) << status.message();
  EXPECT_NEAR(y[0], 3.0f, 1e-6f);
  EXPECT_NEAR(y[1], 6.0f, 1e-6f);
}

TEST(TrtQuantizedAttention_Cpu, WeightsAreRoundedToStepsOfTheScale) {
  // Weights 1/4 and 3/4 with int8 steps of 0.5: 0 (half to even) and 1.
  std::vector<float> q = {1.0f};
  std::vector<float> k = {0.0f, std::log(3.0f)};
  std::vector<float> v = {10.0f, 3.0f};
  std::vector<float> step = {0.5f};
  std::vector<float> y(1);
  const Status status = call_operator(*operators().find("trt_quantized_attention"),
                                      {{"Q", view(q, {1, 1, 1, 1})},
                                       {"K", view(k, {1, 1, 2, 1})},
                                       {"V", view(v, {1, 1, 2, 1})},
                                       {"normalization_quantize_scale", view(step, {1})},
                                       {"Y", view(y, {1, 1, 1, 1})}},
                                      {{"normalization_quantize_to_type", AttributeValue::of_int(3)}});
  ASSERT_TRUE(status.is_ok()) << status.message();
  EXPECT_EQ(y[0], 3.0f);
}

TEST(TrtAttention_Cpu, RefusesRanksAndUnevenForms) {
  std::vector<float> q(4), k(4), y(4);
  std::vector<int32_t> lengths = {0, 4};
  const auto refusal = [&](std::initializer_list<NamedAttribute> attributes) {
    return call_operator(*operators().find("trt_attention"),
                         {{"Q", view(q, {1, 1, 4, 1})},
                          {"K", view(k, {1, 1, 4, 1})},
                          {"V", view(k, {1, 1, 4, 1})},
                          {"Y", view(y, {1, 1, 4, 1})}},
                         attributes);
  };
  const Status ranks = refusal({{"nb_rank", AttributeValue::of_int(2)}});
  EXPECT_EQ(ranks.code(), StatusCode::kUnsupported);
  EXPECT_EQ(ranks.message(), "trt_attention: attribute nb_rank is 2, wanted 1: one device computes a call");
  EXPECT_EQ(refusal({{"nb_rank", AttributeValue::of_int(0)}}).message(),
            "trt_attention: attribute nb_rank is 0, wanted at least 1");
  const Status mixed = call_operator(*operators().find("trt_attention"),
                                     {{"Q", view(q, {1, 1, 4, 1})},
                                      {"K", view(k, {4, 1, 1})},
                                      {"V", view(k, {4, 1, 1})},
                                      {"kv_lengths", TensorView::contiguous(lengths.data(), DType::kI32, {2})},
                                      {"Y", view(y, {1, 1, 4, 1})}},
                                     {{"kv_form", AttributeValue::of_text("packed_nhd")}});
  EXPECT_EQ(mixed.message(),
            "trt_attention: kv_form is packed_nhd and query_form padded_bhnd, wanted a packed query_form");
}

TEST(TrtKvCacheUpdate_Cpu, InPlaceAndCopied_RowsPastTheEndAreLeftOut) {
  std::vector<float> cache = {1, 2, 3, 4, 5, 6};  // [B = 1, Hkv = 2, Lmax = 3, D = 1]
  std::vector<float> update = {70, 80, 71, 81};   // [1, 2, S = 2, 1]
  std::vector<int32_t> at = {2};
  std::vector<float> y(6);
  const auto call = [&](TensorView result) {
    return call_operator(*operators().find("trt_kv_cache_update"),
                         {{"past_cache", view(cache, {1, 2, 3, 1})},
                          {"update", view(update, {1, 2, 2, 1})},
                          {"write_indices", TensorView::contiguous(at.data(), DType::kI32, {1})},
                          {"Y", result}});
  };
  ASSERT_TRUE(call(view(y, {1, 2, 3, 1})).is_ok());
  EXPECT_EQ(y, (std::vector<float>{1, 2, 70, 4, 5, 71}));
  EXPECT_EQ(cache, (std::vector<float>{1, 2, 3, 4, 5, 6}));
  ASSERT_TRUE(call(view(cache, {1, 2, 3, 1})).is_ok());
  EXPECT_EQ(cache, y);
}

}  // namespace
}  // namespace polyop
