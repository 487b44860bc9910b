// DimExpr: texts, numbers, and evaluation in an arithmetic that builds strings, as an expression builder would.
#include "polyop/core/dim_expr.h"

#include <gtest/gtest.h>

#include <limits>
#include <map>
#include <string>
#include <vector>

namespace polyop {
namespace {

TEST(DimExpr, Text_ReadsAsAPersonWritesIt) {
  const DimExpr k = symbol("K");
  EXPECT_EQ(DimExpr(7).to_string(), "7");
  EXPECT_EQ(ceil_div(k, attribute("group_size")).to_string(), "ceil(K / group_size)");
  EXPECT_EQ(floor_div(k + 1, 2).to_string(), "floor((K + 1) / 2)");
  EXPECT_EQ(((k + 1) * (k - 2)).to_string(), "(K + 1) * (K - 2)");
  EXPECT_EQ((k - (k + 1)).to_string(), "K - (K + 1)");
  EXPECT_EQ((k - k * 2).to_string(), "K - K * 2");
  EXPECT_EQ((k % 8).to_string(), "K % 8");
  EXPECT_EQ(minimum(k, maximum(1, k - 3)).to_string(), "min(K, max(1, K - 3))");
  EXPECT_EQ(element("offsets").to_string(), "offsets[b]");
  EXPECT_EQ(element("offsets", 1).to_string(), "offsets[b + 1]");
  EXPECT_EQ(list_entry("padding", pack_rank("X") - 1 - pack_axis()).to_string(), "padding[rank(X) - 1 - axis]");
  EXPECT_EQ(pack_extent("X").to_string(), "X[axis]");
}

TEST(DimExpr, Kinds) {
  EXPECT_TRUE(symbol("B").is_symbol());
  EXPECT_FALSE((symbol("B") + 1).is_symbol());
  EXPECT_TRUE(DimExpr(3).is_constant());
  EXPECT_FALSE(attribute("n").is_constant());
}

TEST(DimExpr, Resolved_SetsTheSlotsOfNamedLeavesOnly) {
  const DimExpr expr = symbol("B") + list_entry("padding", symbol("B") * 2);
  std::vector<std::string> asked;
  const DimExpr resolved = expr.resolved([&](const DimExpr::Node& node) {
    asked.push_back(node.name);
    return static_cast<int32_t>(asked.size());
  });
  EXPECT_EQ(asked, (std::vector<std::string>{"B", "padding", "B"}));
  EXPECT_EQ(resolved.node().lhs->slot, 1);
  EXPECT_EQ(resolved.node().rhs->slot, 2);
  EXPECT_EQ(expr.node().lhs->slot, -1) << "the original is immutable";
  EXPECT_EQ(resolved.to_string(), expr.to_string());
}

/// Names to numbers.
struct NumberEnv {
  using Value = int64_t;
  std::map<std::string, int64_t> names;
  std::vector<int64_t> list;
  int64_t constant(int64_t value) const { return value; }
  int64_t leaf(const DimExpr::Node& node) const { return names.at(node.name); }
  int64_t list_entry(const DimExpr::Node&, int64_t index) const { return list[static_cast<size_t>(index)]; }
  int64_t binary(DimOp op, int64_t lhs, int64_t rhs) const { return apply_dim_op(op, lhs, rhs); }
};

TEST(DimExpr, EvaluatesToNumbers) {
  NumberEnv env{.names = {{"K", 70}, {"group_size", 32}}, .list = {5, 6, 7}};
  const auto value = [&](const DimExpr& expr) { return evaluate(expr.node(), env); };
  EXPECT_EQ(value(ceil_div(symbol("K"), attribute("group_size"))), 3);
  EXPECT_EQ(value(floor_div(symbol("K"), attribute("group_size"))), 2);
  EXPECT_EQ(value(symbol("K") % attribute("group_size")), 6);
  EXPECT_EQ(value(minimum(symbol("K"), 9) + maximum(symbol("K"), 9) - 1), 78);
  EXPECT_EQ(value(list_entry("padding", floor_div(symbol("K"), 35)) * 2), 14);
}

TEST(DimExpr, Division_IsMathematical_AlsoBelowZero) {
  EXPECT_EQ(apply_dim_op(DimOp::kFloorDiv, -7, 2), -4);
  EXPECT_EQ(apply_dim_op(DimOp::kFloorDiv, 7, -2), -4);
  EXPECT_EQ(apply_dim_op(DimOp::kFloorDiv, -6, 2), -3);
  EXPECT_EQ(apply_dim_op(DimOp::kCeilDiv, -7, 2), -3);
  EXPECT_EQ(apply_dim_op(DimOp::kCeilDiv, 7, 2), 4);
  EXPECT_EQ(apply_dim_op(DimOp::kCeilDiv, 6, 2), 3);
  EXPECT_EQ(apply_dim_op(DimOp::kMod, -7, 2), 1);
  EXPECT_EQ(apply_dim_op(DimOp::kMod, 7, 5), 2);
}

TEST(DimExpr, BadDivisorsAndOverflow_NeverTrap) {
  constexpr int64_t kLeast = std::numeric_limits<int64_t>::min();
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  for (const DimOp op : {DimOp::kFloorDiv, DimOp::kCeilDiv, DimOp::kMod}) {
    EXPECT_EQ(apply_dim_op(op, 5, 0), 0);
    EXPECT_EQ(apply_dim_op(op, kLeast, -1), 0);
  }
  EXPECT_EQ(apply_dim_op(DimOp::kAdd, kMost, 1), kLeast);
  EXPECT_EQ(apply_dim_op(DimOp::kSub, kLeast, 1), kMost);
  EXPECT_EQ(apply_dim_op(DimOp::kMul, kMost, 2), -2);
}

/// Stands for a host whose sizes are nodes of its own.
struct StringEnv {
  using Value = std::string;
  int num_nodes = 0;
  std::string constant(int64_t value) { return made("const(" + std::to_string(value) + ")"); }
  std::string leaf(const DimExpr::Node& node) { return made("dim(" + node.name + ")"); }
  std::string list_entry(const DimExpr::Node& node, const std::string& index) {
    return made("entry(" + node.name + "," + index + ")");
  }
  std::string binary(DimOp op, const std::string& lhs, const std::string& rhs) {
    const std::map<DimOp, std::string> names = {
        {DimOp::kAdd, "sum"},          {DimOp::kSub, "sub"}, {DimOp::kMul, "prod"}, {DimOp::kFloorDiv, "floor_div"},
        {DimOp::kCeilDiv, "ceil_div"}, {DimOp::kMod, "mod"}, {DimOp::kMin, "min"},  {DimOp::kMax, "max"}};
    return made(names.at(op) + "(" + lhs + "," + rhs + ")");
  }
  std::string made(std::string text) {
    ++num_nodes;
    return text;
  }
};

TEST(DimExpr, EvaluatesInAnExpressionBuilder) {
  StringEnv env;
  const DimExpr padded = pack_extent("X") + list_entry("padding", pack_rank("X") - 1);
  EXPECT_EQ(evaluate(padded.node(), env), "sum(dim(X),entry(padding,sub(dim(X),const(1))))");
  EXPECT_EQ(env.num_nodes, 6);
  const DimExpr all = minimum(maximum(symbol("a") * 2, element("b", 1)), ceil_div(floor_div(symbol("c"), 3) % 4, 5));
  EXPECT_EQ(evaluate(all.node(), env),
            "min(max(prod(dim(a),const(2)),dim(b)),ceil_div(mod(floor_div(dim(c),const(3)),const(4)),const(5)))");
}

}  // namespace
}  // namespace polyop
