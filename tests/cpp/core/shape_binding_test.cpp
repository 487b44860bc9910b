// Shape binding: what a fitting call binds, and every error text once, word for word.
#include "polyop/core/shape_binding.h"

#include <gtest/gtest.h>

#include <cmath>

#include "tests/cpp/core/bind_by_name.h"

namespace polyop {
namespace {

using testing::bind_text;
using testing::CallByName;
using testing::shaped;

const std::vector<DType> kFloats = {DType::kF32, DType::kF16};

// ---------------------------------------------------------------------------------------------------------------------
// Attributes

OpSchema attribute_schema() {
  return SchemaBuilder("op", "For tests.")
      .operand(input("x").dims({symbol("D")}).dtypes(kFloats))
      .int_attribute("needed", std::nullopt, "")
      .int_attribute("bounded", 4, "", 1, 9)
      .int_attribute("positive", 1, "", 1)
      .float_attribute("factor", 0.5, "")
      .rsqrt_attribute("scale", symbol("D"), "")
      .bool_attribute("flag", true, "")
      .choice_attribute(
          "mode", {{.name = "fp8", .number = 17}, {.name = "int8", .number = 3}, {.name = "off", .number = {}}}, "")
      .build();
}

std::string attribute_text(std::vector<NamedAttribute> attributes) {
  static const OpSchema schema = attribute_schema();
  attributes.push_back({"needed", AttributeValue::of_int(1)});
  return bind_text(schema, {{"x", shaped({16})}}, std::move(attributes));
}

TEST(ShapeBinding_Attributes, DefaultsAndConversions) {
  const OpSchema schema = attribute_schema();
  const CallByName call(schema, {{"x", shaped({16})}},
                        {{"needed", AttributeValue::of_bool(true)},
                         {"factor", AttributeValue::of_int(3)},
                         {"mode", AttributeValue::of_int(3)},
                         {"flag", AttributeValue::of_int(0)}});
  BoundCall bound;
  ASSERT_TRUE(call.bind(&bound).is_ok());
  EXPECT_EQ(bound.attribute("needed").integer, 1);
  EXPECT_EQ(bound.attribute("bounded").integer, 4);
  EXPECT_EQ(bound.attribute("factor").real, 3.0);
  EXPECT_EQ(bound.attribute("scale").real, 0.25);
  EXPECT_EQ(bound.attribute("flag").integer, 0);
  EXPECT_EQ(bound.attribute("mode").integer, 1);
  EXPECT_EQ(bound.extent("D"), 16);
}

TEST(ShapeBinding_Attributes, Texts) {
  EXPECT_EQ(bind_text(attribute_schema(), {{"x", shaped({16})}}), "op: attribute needed is missing");
  EXPECT_EQ(attribute_text({{"bounded", AttributeValue::of_int(10)}}),
            "op: attribute bounded is 10, wanted at least 1 and at most 9");
  EXPECT_EQ(attribute_text({{"positive", AttributeValue::of_int(0)}}),
            "op: attribute positive is 0, wanted at least 1");
  EXPECT_EQ(attribute_text({{"bounded", AttributeValue::of_float(2.0)}}),
            "op: attribute bounded has the wrong kind of value, wanted an integer");
  EXPECT_EQ(attribute_text({{"factor", AttributeValue::of_text("much")}}),
            "op: attribute factor has the wrong kind of value, wanted a number");
  EXPECT_EQ(attribute_text({{"flag", AttributeValue::of_int(2)}}),
            "op: attribute flag has the wrong kind of value, wanted true or false");
  EXPECT_EQ(attribute_text({{"mode", AttributeValue::of_text("int4")}}),
            "op: attribute mode is \"int4\", wanted fp8 (17), int8 (3) or off");
  EXPECT_EQ(attribute_text({{"mode", AttributeValue::of_int(4)}}),
            "op: attribute mode is 4, wanted fp8 (17), int8 (3) or off");
  const OpSchema lists = SchemaBuilder("op", "For tests.")
                             .operand(input("x").dims({symbol("D")}).dtypes(kFloats))
                             .int_list_attribute("ints", "")
                             .float_list_attribute("floats", "")
                             .bytes_attribute("blob", "")
                             .build();
  const std::vector<int64_t> ints = {1};
  const std::vector<double> floats = {1.0};
  const auto list_text = [&](AttributeValue i, AttributeValue f, AttributeValue b) {
    return bind_text(lists, {{"x", shaped({2})}}, {{"ints", i}, {"floats", f}, {"blob", b}});
  };
  const AttributeValue i = AttributeValue::of_ints(ints);
  const AttributeValue f = AttributeValue::of_floats(floats);
  const AttributeValue b = AttributeValue::of_text("bytes");
  EXPECT_EQ(list_text(i, f, b), "");
  EXPECT_EQ(list_text(f, f, b), "op: attribute ints has the wrong kind of value, wanted a list of integers");
  EXPECT_EQ(list_text(i, i, b), "op: attribute floats has the wrong kind of value, wanted a list of numbers");
  EXPECT_EQ(list_text(i, f, i), "op: attribute blob has the wrong kind of value, wanted bytes");
}

// ---------------------------------------------------------------------------------------------------------------------
// Presence

TEST(ShapeBinding_Presence, Texts) {
  const OpSchema schema =
      SchemaBuilder("op", "For tests.")
          .operand(input("x").dims({symbol("D")}).dtypes(kFloats))
          .operand(input("scale")
                       .dims({symbol("D")})
                       .dtypes(kFloats)
                       .required_when(when("mode", "scaled"))
                       .optional_when(when("mode", "either")))
          .operand(input("y").dims({symbol("D")}).dtypes(kFloats).optional())
          .operand(input("z").dims({symbol("D")}).dtypes(kFloats).present_with("y"))
          .choice_attribute(
              "mode",
              {{.name = "plain", .number = {}}, {.name = "scaled", .number = {}}, {.name = "either", .number = {}}}, "")
          .build();
  ASSERT_TRUE(schema.defects().empty());
  const TensorView d = shaped({4});
  const auto mode = [](std::string_view name) {
    return std::vector<NamedAttribute>{{"mode", AttributeValue::of_text(name)}};
  };
  EXPECT_EQ(bind_text(schema, {{"x", d}}), "");
  EXPECT_EQ(bind_text(schema, {}), "op: x is missing");
  EXPECT_EQ(bind_text(schema, {{"x", d}, {"scale", d}}),
            "op: scale is given, but belongs only to mode = scaled or mode = either");
  EXPECT_EQ(bind_text(schema, {{"x", d}}, mode("scaled")), "op: scale is missing; it is required when mode = scaled");
  EXPECT_EQ(bind_text(schema, {{"x", d}}, mode("either")), "");
  EXPECT_EQ(bind_text(schema, {{"x", d}, {"scale", d}}, mode("either")), "");
  EXPECT_EQ(bind_text(schema, {{"x", d}, {"y", d}}), "op: z is missing beside y");
  EXPECT_EQ(bind_text(schema, {{"x", d}, {"z", d}}), "op: z is given without y");
}

TEST(ShapeBinding_Presence, WrongCounts_AreABugOfTheHost) {
  const OpSchema schema = SchemaBuilder("op", "d").operand(input("x").dims({symbol("D")}).dtypes(kFloats)).build();
  BoundCall call;
  const Status status = bind_call(schema, {}, {}, &call);
  EXPECT_EQ(status.code(), StatusCode::kInternal);
  EXPECT_EQ(status.message(), "op: the host passed 0 operands and 0 attributes, the schema has 1 and 0");
}

// ---------------------------------------------------------------------------------------------------------------------
// Shapes and dtypes

OpSchema shape_schema() {
  return SchemaBuilder("op", "For tests.")
      .operand(input("x")
                   .dims_when(when("form", "packed"), {symbol("T"), symbol("H")})
                   .dims_when(when("form", "padded"), {symbol("B"), symbol("S"), symbol("H")})
                   .dtypes(kFloats))
      .operand(input("w").dims({symbol("H"), ceil_div(symbol("H"), 4)}).dtypes({DType::kI8}).optional())
      .operand(input("offsets").dims({symbol("B") + 1}).dtypes({DType::kI32}).optional())
      .operand(
          input("mask").broadcast_dims({symbol("T"), symbol("H")}).dtypes_or_that_of({DType::kBool}, "x").optional())
      .operand(output("out").dims({symbol("H")}).dtype_of("x"))
      .choice_attribute("form", {{.name = "packed", .number = {}}, {.name = "padded", .number = {}}}, "")
      .build();
}

std::string shape_text(std::vector<NamedTensor> operands, std::vector<NamedAttribute> attributes = {}) {
  static const OpSchema schema = shape_schema();
  alignas(64) static char out_memory[4096];
  operands.push_back({"out", TensorView::contiguous(out_memory, DType::kF32, {6})});
  return bind_text(schema, std::move(operands), std::move(attributes));
}

TEST(ShapeBinding_Shapes, Texts) {
  EXPECT_EQ(shape_text({{"x", shaped({5, 6})}}), "");
  EXPECT_EQ(shape_text({{"x", shaped({5, 6, 6})}}), "op: x has rank 3 [5, 6, 6], wanted [T, H] (form = packed)");
  EXPECT_EQ(shape_text({{"x", shaped({5, 6})}}, {{"form", AttributeValue::of_text("padded")}}),
            "op: x has rank 2 [5, 6], wanted [B, S, H] (form = padded)");
  EXPECT_EQ(shape_text({{"x", shaped({5, 7})}}), "op: out axis 0 (H) is 6, wanted 7 as in x axis 1");
  EXPECT_EQ(shape_text({{"x", shaped({5, 6})}, {"w", shaped({6, 3}, DType::kI8)}}),
            "op: w axis 1 (ceil(H / 4)) is 3, wanted 2");
  EXPECT_EQ(shape_text({{"x", shaped({-5, 6})}}), "op: x axis 0 is negative");
  TensorView on_gpu = shaped({6, 2}, DType::kI8);
  on_gpu.device = {DeviceType::kCuda, 1};
  EXPECT_EQ(shape_text({{"x", shaped({5, 6})}, {"w", on_gpu}}), "op: w is on cuda:1, wanted cpu as x");
}

TEST(ShapeBinding_Shapes, SumsBindTheirSymbol) {
  EXPECT_EQ(shape_text({{"x", shaped({5, 6})}, {"offsets", shaped({0}, DType::kI32)}}),
            "op: offsets axis 0 (B + 1) is 0, wanted at least 1");
  const std::vector<NamedAttribute> padded = {{"form", AttributeValue::of_text("padded")}};
  EXPECT_EQ(shape_text({{"x", shaped({5, 2, 6})}, {"offsets", shaped({6}, DType::kI32)}}, padded), "");
  EXPECT_EQ(shape_text({{"x", shaped({5, 2, 6})}, {"offsets", shaped({5}, DType::kI32)}}, padded),
            "op: offsets axis 0 (B + 1) is 5, wanted 6");
}

TEST(ShapeBinding_Shapes, Broadcast) {
  const NamedTensor x = {"x", shaped({5, 6})};
  for (const TensorView& mask :
       {shaped({}), shaped({1}), shaped({6}), shaped({5, 6}), shaped({1, 6}), shaped({5, 1})}) {
    EXPECT_EQ(shape_text({x, {"mask", mask}}), "");
  }
  EXPECT_EQ(shape_text({x, {"mask", shaped({2, 6})}}), "op: mask axis 0 (T) is 2, wanted 5 or 1");
  EXPECT_EQ(shape_text({x, {"mask", shaped({1, 5, 6})}}), "op: mask has rank 3 [1, 5, 6], wanted at most [T, H]");
}

TEST(ShapeBinding_DTypes, Texts) {
  EXPECT_EQ(shape_text({{"x", shaped({5, 6}, DType::kI64)}}), "op: x is i64, wanted f32 or f16");
  EXPECT_EQ(shape_text({{"x", shaped({5, 6}, DType::kF16)}}), "op: out is f32, wanted f16 as x");
  const NamedTensor x = {"x", shaped({5, 6})};
  EXPECT_EQ(shape_text({x, {"mask", shaped({6}, DType::kBool)}}), "");
  EXPECT_EQ(shape_text({x, {"mask", shaped({6}, DType::kF16)}}), "op: mask is f16, wanted bool or f32 as x");
}

TEST(ShapeBinding_Packs, BindAnyRank) {
  const OpSchema schema =
      SchemaBuilder("op", "For tests.")
          .operand(input("x").dims({axes("X"), symbol("D")}).dtypes(kFloats))
          .operand(input("y").dims({map_axes("X", pack_extent("X") * 2), symbol("D")}).dtypes(kFloats))
          .build();
  ASSERT_TRUE(schema.defects().empty());
  EXPECT_EQ(bind_text(schema, {{"x", shaped({3})}, {"y", shaped({3})}}), "");
  EXPECT_EQ(bind_text(schema, {{"x", shaped({2, 5, 3})}, {"y", shaped({4, 10, 3})}}), "");
  EXPECT_EQ(bind_text(schema, {{"x", shaped({2, 5, 3})}, {"y", shaped({4, 5, 3})}}),
            "op: y axis 1 (X[axis] * 2) is 5, wanted 10");
  EXPECT_EQ(bind_text(schema, {{"x", shaped({2, 5, 3})}, {"y", shaped({4, 3})}}), "op: y has rank 2, wanted 3");
  EXPECT_EQ(bind_text(schema, {{"x", shaped({})}, {"y", shaped({3})}}), "op: x has rank 0 [], wanted [X[axis]..., D]");
}

TEST(ShapeBinding_Constraints, Texts) {
  const OpSchema schema = SchemaBuilder("op", "For tests.")
                              .operand(input("x").dims({symbol("Hq"), symbol("Hkv"), symbol("D")}).dtypes(kFloats))
                              .constrain(symbol("Hq"), Relation::kMultipleOf, symbol("Hkv"), "x", 0)
                              .constrain(symbol("D"), Relation::kAtMost, 8, "x", -1)
                              .constrain(symbol("D") % 2, Relation::kEqual, 0, "x", 2)
                              .build();
  EXPECT_EQ(bind_text(schema, {{"x", shaped({6, 3, 4})}}), "");
  EXPECT_EQ(bind_text(schema, {{"x", shaped({6, 4, 4})}}), "op: x axis 0 is 6; Hq = 6 is no multiple of Hkv = 4");
  EXPECT_EQ(bind_text(schema, {{"x", shaped({6, 0, 4})}}), "op: x axis 0 is 6; Hq = 6 is no multiple of Hkv = 0");
  EXPECT_EQ(bind_text(schema, {{"x", shaped({0, 0, 4})}}), "");
  EXPECT_EQ(bind_text(schema, {{"x", shaped({6, 3, 10})}}), "op: x axis 2 is 10; D = 10 is more than 8");
  EXPECT_EQ(bind_text(schema, {{"x", shaped({6, 3, 5})}}), "op: x axis 2 is 5; D % 2 = 1 differs from 0");
}

// ---------------------------------------------------------------------------------------------------------------------
// Memory

class ShapeBinding_Memory : public ::testing::Test {
 protected:
  OpSchema schema =
      SchemaBuilder("op", "For tests.")
          .operand(input("x").dims({symbol("M"), symbol("K")}).dtypes(kFloats))
          .operand(input("dense").dims({symbol("M"), symbol("K")}).dtypes(kFloats).strides(StrideRule::kContiguous))
          .operand(input("any").dims({symbol("M"), symbol("K")}).dtypes(kFloats).strides(StrideRule::kAny))
          .operand(input("marker").dims({symbol("N")}).dtypes({DType::kI32}).shape_only())
          .operand(output("out").dims({symbol("M"), symbol("K")}).dtypes(kFloats).may_alias("x"))
          .build();
  std::array<float, 64> memory{};
  TensorView x = TensorView::contiguous(memory.data(), DType::kF32, {2, 3});
  TensorView dense = TensorView::contiguous(memory.data() + 10, DType::kF32, {2, 3});
  TensorView any = TensorView::contiguous(memory.data() + 20, DType::kF32, {2, 3});
  TensorView marker = TensorView::contiguous(nullptr, DType::kI32, {7});
  TensorView out = TensorView::contiguous(memory.data() + 30, DType::kF32, {2, 3});

  std::string text() const {
    return bind_text(schema, {{"x", x}, {"dense", dense}, {"any", any}, {"marker", marker}, {"out", out}});
  }
};

TEST_F(ShapeBinding_Memory, Strides) {
  EXPECT_EQ(text(), "");
  x.strides = {9, 1};
  any.strides = {1, 2};
  EXPECT_EQ(text(), "");
  x.strides = {1, 2};
  EXPECT_EQ(text(), "op: x axis 1 has stride 2, wanted 1");
  x.strides = {-3, 1};
  EXPECT_EQ(text(), "op: x axis 0 has stride -3, wanted at least 0");
  x.strides = {3, 1};
  dense.strides = {4, 1};
  EXPECT_EQ(text(), "op: dense is not contiguous");
}

TEST_F(ShapeBinding_Memory, Pointers) {
  any.data = nullptr;
  EXPECT_EQ(text(), "op: any has no data");
  any.data = reinterpret_cast<void*>(uintptr_t{4 * 100 + 3});
  EXPECT_EQ(text(), "op: any lies 3 bytes past a multiple of its 4-byte elements, wanted 0");
  for (TensorView* tensor : {&x, &dense, &any, &out}) {
    tensor->shape[0] = 0;
    tensor->data = nullptr;
  }
  EXPECT_EQ(text(), "") << "an empty tensor needs no memory, a shape-only one never does";
}

TEST_F(ShapeBinding_Memory, Aliasing) {
  out = x;
  EXPECT_EQ(text(), "") << "the declared alias, the same view";
  out.data = memory.data() + 1;
  EXPECT_EQ(text(), "op: out is written and shares memory with x");
  out = any;
  EXPECT_EQ(text(), "op: out is written and shares memory with any");
  out.data = memory.data() + 30;
  out.strides = {1, 1};
  EXPECT_EQ(text(), "op: out is written and overlaps itself: two indices share one element");
}

// ---------------------------------------------------------------------------------------------------------------------
// Values

class ShapeBinding_Values : public ::testing::Test {
 protected:
  OpSchema schema =
      SchemaBuilder("op", "For tests.")
          .operand(input("ids").dims({symbol("T")}).dtypes({DType::kI32, DType::kI64}).values(0, symbol("P") - 1))
          .operand(input("offsets").dims({symbol("B") + 1}).dtypes({DType::kI32}).cumulative(symbol("T")))
          .operand(input("lengths")
                       .dims({symbol("B")})
                       .dtypes({DType::kI32})
                       .values(element("offsets", 1) - element("offsets"), symbol("W")))
          .operand(input("table")
                       .dims({symbol("B"), symbol("W")})
                       .dtypes({DType::kI32})
                       .used_values(0, symbol("P") - 1, element("lengths")))
          .operand(input("pool").dims({symbol("P")}).dtypes(kFloats))
          .build();
  std::vector<int64_t> ids = {0, 4, 2};
  std::vector<int32_t> offsets = {0, 1, 3};
  std::vector<int32_t> lengths = {1, 3};
  std::vector<int32_t> table = {0, 99, 99, 1, 2, 4};

  std::string text(DeviceType device = DeviceType::kCpu) {
    std::vector<NamedTensor> operands = {{"ids", TensorView::contiguous(ids.data(), DType::kI64, {3})},
                                         {"offsets", TensorView::contiguous(offsets.data(), DType::kI32, {3})},
                                         {"lengths", TensorView::contiguous(lengths.data(), DType::kI32, {2})},
                                         {"table", TensorView::contiguous(table.data(), DType::kI32, {2, 3})},
                                         {"pool", shaped({5})}};
    for (NamedTensor& operand : operands) operand.tensor.device.type = device;
    return bind_text(schema, operands);
  }
};

TEST_F(ShapeBinding_Values, Texts) {
  ASSERT_TRUE(schema.defects().empty());
  EXPECT_EQ(text(), "");
  ids[1] = 5;
  EXPECT_EQ(text(), "op: ids[1] is 5, wanted 0 to 4 (outside the range)");
  EXPECT_EQ(text(DeviceType::kCuda), "") << "device data is the kernel's to check";
  ids[1] = 4;
  offsets = {1, 1, 3};
  EXPECT_EQ(text(), "op: offsets[0] is 1, wanted 0 to 3 (the first offset must be 0)");
  offsets = {0, 2, 1};
  EXPECT_EQ(text(), "op: offsets[2] is 1, wanted 0 to 3 (offsets must not decrease)");
  offsets = {0, 1, 4};
  EXPECT_EQ(text(), "op: offsets[2] is 4, wanted 0 to 3 (outside the range)");
  offsets = {0, 1, 3};
  lengths = {1, 1};
  EXPECT_EQ(text(), "op: lengths[1] is 1, wanted 2 to 3 (outside the range)") << "the bound differs from row to row";
  lengths = {2, 3};
  EXPECT_EQ(text(), "op: table[0, 1] is 99, wanted 0 to 4 (outside the range)") << "now it is used";
}

TEST_F(ShapeBinding_Values, Strides_AreFollowed) {
  const std::vector<int32_t> spread = {1, -9, 3, -9};
  TensorView view = TensorView::contiguous(const_cast<int32_t*>(spread.data()), DType::kI32, {2});
  view.strides[0] = 2;
  const OpSchema small =
      SchemaBuilder("op", "d")
          .operand(input("ids").dims({symbol("T")}).dtypes({DType::kI32}).strides(StrideRule::kAny).values(0, 3))
          .build();
  EXPECT_EQ(bind_text(small, {{"ids", view}}), "");
}

// ---------------------------------------------------------------------------------------------------------------------
// Outputs

TEST(ShapeBinding_Outputs, Inferred) {
  const OpSchema schema =
      SchemaBuilder("op", "For tests.")
          .operand(input("x").dims({axes("X")}).dtypes(kFloats))
          .operand(input("k").dims({symbol("N")}).dtypes(kFloats).optional())
          .operand(output("out").dims({map_axes("X", pack_extent("X") - attribute("crop"))}).dtype_of("x"))
          .operand(output("k_out").dims({symbol("N") * 2}).dtypes({DType::kI32}).present_with("k"))
          .operand(output("extra").dims({pack_rank("X")}).dtypes({DType::kI64}).required_when(when("more", true)))
          .int_attribute("crop", 1, "")
          .bool_attribute("more", false, "")
          .build();
  ASSERT_TRUE(schema.defects().empty());
  std::array<OutputShape, 3> outputs;
  ASSERT_TRUE(CallByName(schema, {{"x", shaped({3, 4}, DType::kF16)}}, {}).infer(outputs).is_ok());
  EXPECT_TRUE(outputs[0].present);
  EXPECT_EQ(outputs[0].dtype, DType::kF16);
  EXPECT_EQ(outputs[0].rank, 2);
  EXPECT_EQ(outputs[0].extents[0], 2);
  EXPECT_EQ(outputs[0].extents[1], 3);
  EXPECT_FALSE(outputs[1].present);
  EXPECT_FALSE(outputs[2].present);

  ASSERT_TRUE(CallByName(schema, {{"x", shaped({3})}, {"k", shaped({5})}}, {{"more", AttributeValue::of_bool(true)}})
                  .infer(outputs)
                  .is_ok());
  EXPECT_TRUE(outputs[1].present);
  EXPECT_EQ(outputs[1].extents[0], 10);
  EXPECT_EQ(outputs[1].dtype, DType::kI32);
  EXPECT_TRUE(outputs[2].present);
  EXPECT_EQ(outputs[2].extents[0], 1);

  EXPECT_EQ(CallByName(schema, {{"x", shaped({3, 4})}}, {{"crop", AttributeValue::of_int(4)}}).infer(outputs).message(),
            "op: out axis 0 would be -1, wanted at least 0");
  EXPECT_EQ(CallByName(schema, {}, {}).infer(outputs).message(), "op: x is missing");
}

}  // namespace
}  // namespace polyop
