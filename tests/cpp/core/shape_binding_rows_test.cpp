// Shape binding: rules that hold row by row, and rules that do not concern a call.
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <vector>

#include "polyop/core/shape_binding.h"

namespace polyop {
namespace {

/// x [B, W] i32 with columns [first[b], first[b] + count) used, either form of capacity, y [B] optional.
OpSchema make_schema() {
  const DimExpr end = element("first") + element("count");
  return SchemaBuilder("demo", "For tests.")
      .operand(input("x")
                   .dims({symbol("B"), symbol("W")})
                   .dtypes({DType::kI32})
                   .used_values_when(when("strict", true), 0, 9, element("first"), end))
      .operand(input("first").dims({symbol("B")}).dtypes({DType::kI32}).optional())
      .operand(input("count").dims({symbol("B")}).dtypes({DType::kI32}))
      .operand(input("extra").dims({symbol("E"), symbol("F")}).dtypes({DType::kI32}).optional())
      .bool_attribute("strict", true, "whether the values of x are checked")
      .constrain(symbol("W"), Relation::kAtMost, symbol("E") * symbol("F"), "x", 1)
      .constrain_rows(symbol("B"), end, Relation::kAtMost, symbol("W"), "count")
      .constrain_rows(symbol("B"), element("count"), Relation::kMultipleOf, symbol("E"), "count")
      .build();
}

class RowRules : public ::testing::Test {
 protected:
  OpSchema schema = make_schema();
  std::vector<int32_t> x = {-1, 3, -1, -1, 9, 4};  // [2, 3]
  std::vector<int32_t> first = {1, 1};
  std::vector<int32_t> count = {1, 2};
  bool has_first = true;
  bool strict = true;
  std::vector<int64_t> extra;  // extents of `extra`; empty: absent

  std::string bind() {
    const TensorView x_view = TensorView::contiguous(x.data(), DType::kI32, {2, 3});
    const TensorView first_view = TensorView::contiguous(first.data(), DType::kI32, {2});
    const TensorView count_view = TensorView::contiguous(count.data(), DType::kI32, {2});
    std::array<int32_t, 16> extra_data{};
    TensorView extra_view;
    if (!extra.empty()) extra_view = TensorView::contiguous(extra_data.data(), DType::kI32, extra.data(), 2);
    const std::array<const TensorView*, 4> operands = {&x_view, has_first ? &first_view : nullptr, &count_view,
                                                       extra.empty() ? nullptr : &extra_view};
    const std::array<AttributeValue, 1> attributes = {AttributeValue::of_bool(strict)};
    BoundCall call;
    return bind_call(schema, operands, attributes, &call).message();
  }
};

TEST_F(RowRules, SchemaHasNoDefects) { EXPECT_TRUE(schema.defects().empty()); }

TEST_F(RowRules, ValuesOutsideTheUsedColumns_AreNotRead) {
  EXPECT_EQ(bind(), "");
  first = {0, 1};
  EXPECT_EQ(bind(), "demo: x[0, 0] is -1, wanted 0 to 9 (outside the range)");
  strict = false;
  EXPECT_EQ(bind(), "");
}

TEST_F(RowRules, Violation_NamesTheRow) {
  count = {1, 3};
  EXPECT_EQ(bind(), "demo: count at b = 1: first[b] + count[b] = 4 is more than W = 3");
}

TEST_F(RowRules, AbsentOperand_CountsAsZeros) {
  has_first = false;
  x = {0, 0, 0, 0, 0, 0};
  count = {3, 3};
  EXPECT_EQ(bind(), "");
  count = {3, 4};
  EXPECT_EQ(bind(), "demo: count at b = 1: first[b] + count[b] = 4 is more than W = 3");
}

TEST_F(RowRules, UnboundSymbol_AnywhereInARule_SwitchesItOff) {
  EXPECT_EQ(bind(), "");  // E * F is unknown: -1 * -1 must not count as 1
  extra = {1, 2};
  EXPECT_EQ(bind(), "demo: x axis 1 is 3; W = 3 is more than E * F = 2");
  extra = {2, 2};
  EXPECT_EQ(bind(), "demo: count at b = 0: count[b] = 1 is no multiple of E = 2");
}

}  // namespace
}  // namespace polyop
