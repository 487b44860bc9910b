// OpSchema: names resolve to slots, and a declaration that cannot be right says what is wrong.
#include "polyop/core/op_schema.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace polyop {
namespace {

const std::vector<DType> kFloats = {DType::kF32, DType::kF16};

std::vector<std::string> defects_of(const SchemaBuilder& builder) {
  const OpSchema schema = builder.build();
  return {schema.defects().begin(), schema.defects().end()};
}

OperandBuilder fine(std::string name) { return input(std::move(name)).dims({symbol("M")}).dtypes(kFloats); }

TEST(OpSchema, Names_ResolveToSlots) {
  const OpSchema schema =
      SchemaBuilder("scale_rows", "Multiplies each row by its factor.")
          .operand(input("x").dims({symbol("M"), symbol("K")}).dtypes(kFloats))
          .operand(input("factor").dims({symbol("M")}).dtype_of("x").optional())
          .operand(output("out").dims({symbol("M"), symbol("K") + 1}).dtype_of("x").may_alias("x"))
          .choice_attribute("mode", {{.name = "up", .number = 3}, {.name = "down", .number = {}}}, "")
          .build();
  EXPECT_TRUE(schema.defects().empty());
  EXPECT_EQ(schema.name(), "scale_rows");
  EXPECT_EQ(schema.doc(), "Multiplies each row by its factor.");
  EXPECT_EQ(schema.operand_index("out"), 2);
  EXPECT_EQ(schema.operand_index("nothing"), -1);
  EXPECT_EQ(schema.attribute_index("mode"), 0);
  EXPECT_EQ(schema.attribute_index("x"), -1);
  EXPECT_EQ(schema.symbol_index("K"), 1);
  EXPECT_EQ(schema.symbol_index("Q"), -1);
  EXPECT_EQ(schema.operands()[2].alias_slot, 0);
  EXPECT_EQ(schema.operands()[1].dtypes[0].same_as_slot, 0);
  EXPECT_EQ(schema.operands()[2].shapes[0].dims[1].extent.node().lhs->slot, 1);
  EXPECT_EQ(schema.operands()[2].shapes[0].to_string(), "[M, K + 1]");
  EXPECT_TRUE(schema.operands()[2].is_written());
  EXPECT_FALSE(schema.operands()[0].is_written());
  EXPECT_TRUE(schema.operands()[0].always_required());
  EXPECT_FALSE(schema.operands()[1].always_required());
}

TEST(OpSchema, Conditions_Resolve) {
  const OpSchema schema =
      SchemaBuilder("op", "doc")
          .operand(fine("x").optional_when(when("mode", "down")).optional_when(when("fast", true)))
          .choice_attribute("mode", {{.name = "up", .number = {}}, {.name = "down", .number = {}}}, "")
          .bool_attribute("fast", false, "")
          .build();
  EXPECT_TRUE(schema.defects().empty());
  const std::vector<PresenceRule>& rules = schema.operands()[0].presence;
  EXPECT_EQ(rules[0].condition->slot, 0);
  EXPECT_EQ(rules[0].condition->integer, 1);
  EXPECT_EQ(rules[0].condition->to_string(), "mode = down");
  EXPECT_EQ(rules[1].condition->slot, 1);
  EXPECT_EQ(rules[1].condition->to_string(), "fast = true");
}

TEST(OpSchema, UnknownNames_AreDefects) {
  const SchemaBuilder base("op", "doc");
  using Texts = std::vector<std::string>;
  EXPECT_EQ(defects_of(SchemaBuilder(base).operand(input("x").dims({symbol("M") + symbol("Q")}).dtypes(kFloats))),
            (Texts{"symbol M is bound by no operand", "symbol Q is bound by no operand"}));
  EXPECT_EQ(defects_of(SchemaBuilder(base).operand(fine("x").dims({symbol("M") * attribute("n")}))),
            (Texts{"no attribute is named n"}));
  EXPECT_EQ(defects_of(SchemaBuilder(base).operand(fine("x").values(0, element("offsets")))),
            (Texts{"no operand is named offsets"}));
  EXPECT_EQ(defects_of(SchemaBuilder(base).operand(input("x").dims({symbol("M")}).dtype_of("y"))),
            (Texts{"no operand is named y"}));
  EXPECT_EQ(defects_of(SchemaBuilder(base).operand(fine("x").present_with("y"))), (Texts{"no operand is named y"}));
  EXPECT_EQ(defects_of(SchemaBuilder(base).operand(fine("x").may_alias("y"))), (Texts{"no operand is named y"}));
  EXPECT_EQ(defects_of(SchemaBuilder(base).operand(fine("x").optional_when(when("mode", "up")))),
            (Texts{"no attribute is named mode"}));
  EXPECT_EQ(defects_of(SchemaBuilder(base)
                           .operand(fine("x").optional_when(when("mode", "left")))
                           .choice_attribute("mode", {{.name = "up", .number = {}}}, "")),
            (Texts{"mode has no choice left"}));
  EXPECT_EQ(defects_of(SchemaBuilder(base).operand(fine("x")).constrain(symbol("M"), Relation::kAtMost, 3, "y", 0)),
            (Texts{"no operand is named y"}));
  EXPECT_EQ(
      defects_of(SchemaBuilder(base).operand(fine("x")).constrain_rows(symbol("B"), 1, Relation::kAtMost, 3, "x")),
      (Texts{"symbol B is bound by no operand"}));
  EXPECT_EQ(defects_of(SchemaBuilder(base).operand(fine("x")).rsqrt_attribute("scale", symbol("D"), "")),
            (Texts{"symbol D is bound by no operand"}));
}

TEST(OpSchema, MissingRulesAndTooMuch_AreDefects) {
  using Texts = std::vector<std::string>;
  const SchemaBuilder base("op", "doc");
  EXPECT_EQ(defects_of(SchemaBuilder(base).operand(input("x").dtypes(kFloats))), (Texts{"x has no shape"}));
  EXPECT_EQ(defects_of(SchemaBuilder(base).operand(input("x").dims({symbol("M")}))), (Texts{"x has no dtype"}));
  EXPECT_EQ(defects_of(SchemaBuilder(base)
                           .operand(input("x").dims({axes("X")}).dtypes(kFloats))
                           .operand(input("y").dims({axes("Y")}).dtypes(kFloats))),
            (Texts{"more than one pack of axes"}));
  SchemaBuilder many("op", "doc");
  for (int i = 0; i <= kMaxOperands; ++i) {
    many.operand(input("x" + std::to_string(i)).dims({symbol("M" + std::to_string(i))}).dtypes(kFloats));
    many.bool_attribute("a" + std::to_string(i), false, "");
  }
  EXPECT_EQ(defects_of(many), (Texts{"too many operands", "too many symbols", "too many attributes"}));
}

TEST(OpSchema, Json_HoldsEveryPart) {
  const OpSchema schema = SchemaBuilder("op", "says \"hi\"\n")
                              .operand(fine("x").values(0, symbol("M") - 1))
                              .int_attribute("n", 4, "count", 1, 9)
                              .rsqrt_attribute("scale", symbol("M"), "")
                              .constrain(symbol("M") % 2, Relation::kEqual, 0, "x", 0)
                              .constrain_rows(symbol("M"), element("x"), Relation::kAtMost, 5, "x")
                              .build();
  EXPECT_EQ(schema.to_json(),
            R"({"name":"op","doc":"says \"hi\"\u000a","operands":[{"name":"x","doc":"","role":"input",)"
            R"("strides":"unit_last_axis","shape_only":false,"alias_of":"","presence":[],"shapes":[{"condition":null,)"
            R"("broadcast":false,"text":"[M]","dims":[{"pack":"","extent":["symbol","M"]}]}],"dtypes":[{"condition":)"
            R"(null,"same_as":"","allowed":["f32","f16"]}],"values":[{"condition":null,"lowest":0,"highest":["sub",)"
            R"(["symbol","M"],1],"cumulative":false,"first":null,"used":null}]}],"attributes":[{"name":"n","doc":)"
            R"("count","kind":"int","required":false,"default":4,"default_rsqrt":null,"min":1,"max":9,"choices":[]},)"
            R"({"name":"scale","doc":"","kind":"float","required":false,"default":null,"default_rsqrt":["symbol","M"],)"
            R"("min":null,"max":null,"choices":[]}],"constraints":[{"lhs":["mod",["symbol","M"],2],"relation":"equal",)"
            R"("rhs":0,"operand":"x","axis":0}],"row_constraints":[{"rows":["symbol","M"],"lhs":["element","x",0],)"
            R"("relation":"at_most","rhs":5,"operand":"x"}],"symbols":["M"]})");
}

}  // namespace
}  // namespace polyop
