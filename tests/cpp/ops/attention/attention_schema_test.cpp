// The operator attention through its schema: what it binds, what it refuses and with which text.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "polyop/core/call.h"
#include "polyop/ops/attention/attention.h"

namespace polyop::testing {
namespace {

// Operands by name, each with memory of its own; tests change extents or values and call.
class Call {
 public:
  Call() : op_(make_attention_operator()) {}

  Call& tensor(const std::string& name, DType dtype, std::vector<int64_t> shape, double value = 0.0) {
    Operand& operand = operands_[name];
    int64_t elems = 1;
    for (int64_t extent : shape) elems *= extent;
    operand.memory.assign(static_cast<size_t>(std::max<int64_t>(1, elems * dtype_bytes(dtype))), std::byte{0});
    operand.view =
        TensorView::contiguous(operand.memory.data(), dtype, shape.data(), static_cast<int32_t>(shape.size()));
    for (int64_t i = 0; i < elems && dtype == DType::kF32; ++i) data<float>(name)[i] = static_cast<float>(value);
    return *this;
  }
  Call& ints(const std::string& name, std::vector<int64_t> shape, const std::vector<int32_t>& values) {
    tensor(name, DType::kI32, std::move(shape));
    std::copy(values.begin(), values.end(), data<int32_t>(name));
    return *this;
  }
  Call& attribute(const std::string& name, AttributeValue value) {
    attributes_[name] = value;
    return *this;
  }
  Call& without(const std::string& name) {
    operands_.erase(name);
    return *this;
  }
  template <class T>
  T* data(const std::string& name) {
    return reinterpret_cast<T*>(operands_[name].memory.data());
  }

  Status run() {
    const OpSchema& schema = op_->schema();
    std::vector<const TensorView*> operands(schema.operands().size(), nullptr);
    std::vector<AttributeValue> attributes(schema.attributes().size());
    for (const auto& [name, operand] : operands_) operands[schema.operand_index(name)] = &operand.view;
    for (const auto& [name, value] : attributes_) attributes[schema.attribute_index(name)] = value;
    BoundCall call;
    POLYOP_RETURN_IF_ERROR(bind_call(schema, operands, attributes, &call));
    return op_->run(call, HostWorkspaces::of_this_thread(), {});
  }
  std::string error() {
    const Status status = run();
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
    return status.message();
  }

 private:
  struct Operand {
    std::vector<std::byte> memory;
    TensorView view;
  };
  std::unique_ptr<Operator> op_;
  std::map<std::string, Operand> operands_;
  std::map<std::string, AttributeValue> attributes_;
};

// Two sequences of 3 and 1 rows over pages of 4 keys, Hq 4, Hkv 2, D 8.
Call paged_call() {
  Call call;
  call.tensor("q", DType::kF32, {5, 4, 8})
      .tensor("k", DType::kF32, {6, 4, 2, 8})
      .tensor("v", DType::kF32, {6, 4, 2, 8}, 2.0)
      .ints("query_offsets", {3}, {0, 3, 4})
      .ints("kv_lengths", {2}, {3, 9})
      .ints("page_table", {2, 3}, {5, 1 << 30, -7, 0, 2, 4})
      .tensor("out", DType::kF32, {5, 4, 8}, -1.0);
  return call;
}

TEST(AttentionSchema, HasNoDefects) {
  const auto op = make_attention_operator();
  EXPECT_TRUE(op->schema().defects().empty());
}

TEST(AttentionSchema, PagedCallRuns) {
  Call call = paged_call();
  call.tensor("lse", DType::kF32, {5, 4}).attribute("return_lse", AttributeValue::of_bool(true));
  const Status status = call.run();
  ASSERT_TRUE(status.is_ok()) << status.message();
  for (int i = 0; i < 4 * 4 * 8; ++i) EXPECT_EQ(call.data<float>("out")[i], 2.0f);
  for (int i = 4 * 4 * 8; i < 5 * 4 * 8; ++i) EXPECT_EQ(call.data<float>("out")[i], 0.0f);  // row of no sequence
  EXPECT_FLOAT_EQ(call.data<float>("lse")[0], 0.0f);                                        // ln 1
  EXPECT_FLOAT_EQ(call.data<float>("lse")[3 * 4], std::log(9.0f));
  EXPECT_EQ(call.data<float>("lse")[4 * 4], -std::numeric_limits<float>::infinity());
}

TEST(AttentionSchema, ScaleDefaultsToTheRootOfTheHeadSize) {
  Call call = paged_call();
  for (int i = 0; i < 5 * 4 * 8; ++i) call.data<float>("q")[i] = 1.0f;
  for (int i = 0; i < 6 * 4 * 2 * 8; ++i) call.data<float>("k")[i] = 1.0f;
  call.tensor("lse", DType::kF32, {5, 4}).attribute("return_lse", AttributeValue::of_bool(true));
  ASSERT_TRUE(call.run().is_ok());
  EXPECT_FLOAT_EQ(call.data<float>("lse")[0], std::sqrt(8.0f));
  call.attribute("scale", AttributeValue::of_float(0.5));
  ASSERT_TRUE(call.run().is_ok());
  EXPECT_FLOAT_EQ(call.data<float>("lse")[0], 4.0f);
}

TEST(AttentionSchema, PackedQueriesAndKeysBindTheirSequencesByOffsets) {
  Call call;
  call.tensor("q", DType::kF32, {4, 2, 8})
      .tensor("k", DType::kF32, {5, 2, 8})
      .tensor("v", DType::kF32, {5, 2, 3}, 1.5)
      .ints("query_offsets", {3}, {0, 3, 4})
      .ints("kv_offsets", {3}, {0, 3, 5})
      .tensor("out", DType::kF32, {4, 2, 3})
      .attribute("kv_form", AttributeValue::of_text("packed"));
  const Status status = call.run();
  ASSERT_TRUE(status.is_ok()) << status.message();
  for (int i = 0; i < 4 * 2 * 3; ++i) EXPECT_EQ(call.data<float>("out")[i], 1.5f);
  call.ints("kv_offsets", {4}, {0, 3, 5, 5});
  EXPECT_EQ(call.error(), "attention: kv_offsets axis 0 (B + 1) is 4, wanted 3");
}

TEST(AttentionSchema, PaddedCallTakesAMaskOfLowRank) {
  Call call;
  call.tensor("q", DType::kF32, {2, 3, 2, 8})
      .tensor("k", DType::kF32, {2, 4, 1, 8})
      .tensor("v", DType::kF32, {2, 4, 1, 8})
      .tensor("mask", DType::kBool, {3, 4})
      .tensor("out", DType::kF32, {2, 3, 2, 8})
      .attribute("query_form", AttributeValue::of_text("padded"))
      .attribute("kv_form", AttributeValue::of_text("padded"))
      .attribute("causal", AttributeValue::of_text("none"));
  for (int i = 0; i < 2 * 4 * 8; ++i) call.data<float>("v")[i] = static_cast<float>(i / 8);
  call.data<bool>("mask")[0 * 4 + 1] = true;
  call.data<bool>("mask")[2 * 4 + 3] = true;
  const Status status = call.run();
  ASSERT_TRUE(status.is_ok()) << status.message();
  const float wanted[2][3] = {{1.0f, 0.0f, 3.0f}, {5.0f, 0.0f, 7.0f}};
  for (int b = 0; b < 2; ++b) {
    for (int i = 0; i < 3; ++i) EXPECT_EQ(call.data<float>("out")[(b * 3 + i) * 2 * 8], wanted[b][i]);
  }
}

TEST(AttentionSchema, HeadsThatDoNotDivide) {
  Call call = paged_call();
  call.tensor("k", DType::kF32, {6, 4, 3, 8}).tensor("v", DType::kF32, {6, 4, 3, 8});
  EXPECT_EQ(call.error(), "attention: k axis 2 is 3; Hq = 4 is no multiple of Hkv = 3");
}

TEST(AttentionSchema, HeadSizesThatDiffer) {
  Call call = paged_call();
  call.tensor("k", DType::kF32, {6, 4, 2, 16});
  EXPECT_EQ(call.error(), "attention: k axis 3 (D) is 16, wanted 8 as in q axis 2");
}

TEST(AttentionSchema, ValuesOutOfRange) {
  Call call = paged_call();
  call.ints("kv_lengths", {2}, {3, 13});
  EXPECT_EQ(call.error(), "attention: kv_lengths[1] is 13, wanted 0 to 12 (outside the range)");
  call = paged_call();
  call.ints("query_offsets", {3}, {0, 3, 6});
  EXPECT_EQ(call.error(), "attention: query_offsets[2] is 6, wanted 0 to 5 (outside the range)");
  call = paged_call();
  call.ints("query_offsets", {3}, {0, 3, 2});
  EXPECT_EQ(call.error(), "attention: query_offsets[2] is 2, wanted 0 to 5 (offsets must not decrease)");
  call = paged_call();
  call.ints("page_table", {2, 3}, {5, 9, 9, 0, 2, 6});
  EXPECT_EQ(call.error(), "attention: page_table[1, 2] is 6, wanted 0 to 5 (outside the range)");
  for (int i = 0; i < 5 * 4 * 8; ++i) EXPECT_EQ(call.data<float>("out")[i], -1.0f);
}

TEST(AttentionSchema, OperandsThatBelongToOtherForms) {
  Call call = paged_call();
  call.without("page_table");
  EXPECT_EQ(call.error(), "attention: page_table is missing; it is required when kv_form = paged");
  call = paged_call();
  call.tensor("mask", DType::kBool, {5, 12});
  EXPECT_EQ(call.error(), "attention: mask is given, but belongs only to kv_form = padded");
  call = paged_call();
  call.tensor("output_scale", DType::kF32, {1});
  EXPECT_EQ(call.error(), "attention: output_scale is given, but belongs only to an f8e4m3 out; out is f32");
  call = paged_call();
  call.tensor("sinks", DType::kF32, {4}).attribute("normalization", AttributeValue::of_text("none"));
  EXPECT_EQ(call.error(), "attention: sinks belong only to normalization = softmax");
}

TEST(AttentionSchema, TreeMaskTooNarrow) {
  Call call = paged_call();
  call.tensor("q", DType::kF32, {40, 4, 8}).tensor("out", DType::kF32, {40, 4, 8});
  call.ints("query_offsets", {3}, {0, 3, 40}).tensor("tree_mask", DType::kI32, {40, 1});
  const std::string text = call.error();
  EXPECT_NE(text.find("tree_mask at b = 1"), std::string::npos) << text;
}

}  // namespace
}  // namespace polyop::testing
