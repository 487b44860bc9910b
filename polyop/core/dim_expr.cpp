#include "polyop/core/dim_expr.h"

#include <algorithm>

namespace polyop {
namespace {

using Node = DimExpr::Node;

DimExpr leaf(DimOp op, std::string name, int64_t value = 0) {
  return DimExpr(std::make_shared<const Node>(
      Node{.op = op, .value = value, .name = std::move(name), .slot = -1, .lhs = nullptr, .rhs = nullptr}));
}

DimExpr binary(DimOp op, const DimExpr& lhs, const DimExpr& rhs) {
  return DimExpr(std::make_shared<const Node>(Node{.op = op,
                                                   .value = 0,
                                                   .name = {},
                                                   .slot = -1,
                                                   .lhs = std::make_shared<const Node>(lhs.node()),
                                                   .rhs = std::make_shared<const Node>(rhs.node())}));
}

std::string text(const Node& node);

// An operand of a product or quotient, in parentheses when it is a sum.
std::string factor_text(const Node& node) {
  const bool is_sum = node.op == DimOp::kAdd || node.op == DimOp::kSub;
  return is_sum ? "(" + text(node) + ")" : text(node);
}

std::string text(const Node& node) {
  switch (node.op) {
    case DimOp::kConstant:
      return std::to_string(node.value);
    case DimOp::kSymbol:
    case DimOp::kAttribute:
      return node.name;
    case DimOp::kListEntry:
      return node.name + "[" + text(*node.lhs) + "]";
    case DimOp::kElement:
      return node.name + (node.value == 0 ? "[b]" : "[b + " + std::to_string(node.value) + "]");
    case DimOp::kPackExtent:
      return node.name + "[axis]";
    case DimOp::kAxis:
      return "axis";
    case DimOp::kRank:
      return "rank(" + node.name + ")";
    case DimOp::kAdd:
      return text(*node.lhs) + " + " + text(*node.rhs);
    case DimOp::kSub:
      return text(*node.lhs) + " - " + factor_text(*node.rhs);
    case DimOp::kMul:
      return factor_text(*node.lhs) + " * " + factor_text(*node.rhs);
    case DimOp::kFloorDiv:
      return "floor(" + factor_text(*node.lhs) + " / " + factor_text(*node.rhs) + ")";
    case DimOp::kCeilDiv:
      return "ceil(" + factor_text(*node.lhs) + " / " + factor_text(*node.rhs) + ")";
    case DimOp::kMod:
      return factor_text(*node.lhs) + " % " + factor_text(*node.rhs);
    case DimOp::kMin:
      return "min(" + text(*node.lhs) + ", " + text(*node.rhs) + ")";
    case DimOp::kMax:
      return "max(" + text(*node.lhs) + ", " + text(*node.rhs) + ")";
  }
  return "?";
}

std::shared_ptr<const Node> resolve(const Node& node, const std::function<int32_t(const Node&)>& slot_of) {
  Node copy = node;
  if (!node.name.empty()) copy.slot = slot_of(node);
  if (node.lhs) copy.lhs = resolve(*node.lhs, slot_of);
  if (node.rhs) copy.rhs = resolve(*node.rhs, slot_of);
  return std::make_shared<const Node>(std::move(copy));
}

}  // namespace

DimExpr::DimExpr(int64_t constant) : node_(leaf(DimOp::kConstant, {}, constant).node_) {}

std::string DimExpr::to_string() const { return text(*node_); }

DimExpr DimExpr::resolved(const std::function<int32_t(const Node&)>& slot_of) const {
  return DimExpr(resolve(*node_, slot_of));
}

DimExpr symbol(std::string name) { return leaf(DimOp::kSymbol, std::move(name)); }
DimExpr attribute(std::string name) { return leaf(DimOp::kAttribute, std::move(name)); }
DimExpr element(std::string operand_name, int64_t row_offset) {
  return leaf(DimOp::kElement, std::move(operand_name), row_offset);
}
DimExpr pack_extent(std::string pack_name) { return leaf(DimOp::kPackExtent, std::move(pack_name)); }
DimExpr pack_axis() { return leaf(DimOp::kAxis, {}); }
DimExpr pack_rank(std::string pack_name) { return leaf(DimOp::kRank, std::move(pack_name)); }
DimExpr list_entry(std::string attribute_name, const DimExpr& index) {
  return DimExpr(std::make_shared<const Node>(Node{.op = DimOp::kListEntry,
                                                   .value = 0,
                                                   .name = std::move(attribute_name),
                                                   .slot = -1,
                                                   .lhs = std::make_shared<const Node>(index.node()),
                                                   .rhs = nullptr}));
}

DimExpr operator+(const DimExpr& lhs, const DimExpr& rhs) { return binary(DimOp::kAdd, lhs, rhs); }
DimExpr operator-(const DimExpr& lhs, const DimExpr& rhs) { return binary(DimOp::kSub, lhs, rhs); }
DimExpr operator*(const DimExpr& lhs, const DimExpr& rhs) { return binary(DimOp::kMul, lhs, rhs); }
DimExpr operator%(const DimExpr& lhs, const DimExpr& rhs) { return binary(DimOp::kMod, lhs, rhs); }
DimExpr floor_div(const DimExpr& lhs, const DimExpr& rhs) { return binary(DimOp::kFloorDiv, lhs, rhs); }
DimExpr ceil_div(const DimExpr& lhs, const DimExpr& rhs) { return binary(DimOp::kCeilDiv, lhs, rhs); }
DimExpr minimum(const DimExpr& lhs, const DimExpr& rhs) { return binary(DimOp::kMin, lhs, rhs); }
DimExpr maximum(const DimExpr& lhs, const DimExpr& rhs) { return binary(DimOp::kMax, lhs, rhs); }

int64_t apply_dim_op(DimOp op, int64_t lhs, int64_t rhs) {
  // Sizes come from callers: wrap around instead of overflowing, the comparison with the real extent then fails.
  const auto a = static_cast<uint64_t>(lhs);
  const auto b = static_cast<uint64_t>(rhs);
  const auto floor_quotient = [](int64_t n, int64_t d) { return n / d - ((n % d != 0 && (n < 0) != (d < 0)) ? 1 : 0); };
  const bool cannot_divide = rhs == 0 || rhs == -1;  // -1 would trap on the least number
  switch (op) {
    case DimOp::kAdd:
      return static_cast<int64_t>(a + b);
    case DimOp::kSub:
      return static_cast<int64_t>(a - b);
    case DimOp::kMul:
      return static_cast<int64_t>(a * b);
    case DimOp::kFloorDiv:
      return cannot_divide ? 0 : floor_quotient(lhs, rhs);
    case DimOp::kCeilDiv:
      return cannot_divide ? 0 : floor_quotient(lhs, rhs) + (lhs % rhs != 0 ? 1 : 0);
    case DimOp::kMod:
      return cannot_divide ? 0 : lhs - floor_quotient(lhs, rhs) * rhs;
    case DimOp::kMin:
      return std::min(lhs, rhs);
    case DimOp::kMax:
      return std::max(lhs, rhs);
    default:
      return 0;
  }
}

}  // namespace polyop
