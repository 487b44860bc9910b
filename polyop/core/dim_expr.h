// DimExpr: an integer expression over shape symbols, attributes and list entries. One definition gives numbers at call
// time, symbolic sizes to a tracer (torch SymInt, through the schema's JSON) and nodes to an expression builder
// (TensorRT's IExprBuilder): evaluate() works on whatever arithmetic its environment brings.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace polyop {

enum class DimOp : uint8_t {
  kConstant,    // value
  kSymbol,      // extent bound to a name: Hkv
  kAttribute,   // integer attribute
  kListEntry,   // entry of an integer-list attribute, index given by lhs; 0 past either end
  kElement,     // value of an integer operand at the current row + `value`; host-visible data only, never in a shape
  kPackExtent,  // extent of a pack of axes at the current axis
  kAxis,        // the current axis of the pack
  kRank,        // number of axes in the pack
  kAdd,
  kSub,
  kMul,
  kFloorDiv,
  kCeilDiv,
  kMod,
  kMin,
  kMax,
};

/// An immutable expression; copying shares the nodes. Arithmetic operators build larger ones.
class DimExpr {
 public:
  struct Node {
    DimOp op;
    int64_t value = 0;  // kConstant: the number; kElement: offset from the current row
    std::string name;   // symbol, attribute, operand or pack
    int32_t slot = -1;  // index of `name` in its schema, set by resolved()
    std::shared_ptr<const Node> lhs;
    std::shared_ptr<const Node> rhs;
  };

  DimExpr(int64_t constant);  // NOLINT(google-explicit-constructor): `B + 1` must read as written
  DimExpr(int constant) : DimExpr(static_cast<int64_t>(constant)) {}  // NOLINT(google-explicit-constructor)
  explicit DimExpr(std::shared_ptr<const Node> node) : node_(std::move(node)) {}

  [[nodiscard]] const Node& node() const { return *node_; }
  [[nodiscard]] bool is_symbol() const { return node_->op == DimOp::kSymbol; }
  [[nodiscard]] bool is_constant() const { return node_->op == DimOp::kConstant; }

  /// As a person writes it: "ceil(K / group_size)".
  [[nodiscard]] std::string to_string() const;

  /// The same expression with every named leaf's slot set to slot_of(leaf).
  [[nodiscard]] DimExpr resolved(const std::function<int32_t(const Node&)>& slot_of) const;

 private:
  std::shared_ptr<const Node> node_;
};

DimExpr symbol(std::string name);
DimExpr attribute(std::string name);
DimExpr list_entry(std::string attribute_name, const DimExpr& index);
DimExpr element(std::string operand_name, int64_t row_offset = 0);
DimExpr pack_extent(std::string pack_name);
DimExpr pack_axis();
DimExpr pack_rank(std::string pack_name);

DimExpr operator+(const DimExpr& lhs, const DimExpr& rhs);
DimExpr operator-(const DimExpr& lhs, const DimExpr& rhs);
DimExpr operator*(const DimExpr& lhs, const DimExpr& rhs);
DimExpr operator%(const DimExpr& lhs, const DimExpr& rhs);
DimExpr floor_div(const DimExpr& lhs, const DimExpr& rhs);
DimExpr ceil_div(const DimExpr& lhs, const DimExpr& rhs);
DimExpr minimum(const DimExpr& lhs, const DimExpr& rhs);
DimExpr maximum(const DimExpr& lhs, const DimExpr& rhs);

/// Evaluates `node` in `env`. Env::Value is the type of a size; env gives the leaves with constant(int64_t) and
/// leaf(const DimExpr::Node&) (kListEntry's index is evaluated first and handed to list_entry(node, index)), and the
/// arithmetic with binary(DimOp, Value, Value).
template <class Env>
typename Env::Value evaluate(const DimExpr::Node& node, Env& env) {
  switch (node.op) {
    case DimOp::kConstant:
      return env.constant(node.value);
    case DimOp::kSymbol:
    case DimOp::kAttribute:
    case DimOp::kElement:
    case DimOp::kPackExtent:
    case DimOp::kAxis:
    case DimOp::kRank:
      return env.leaf(node);
    case DimOp::kListEntry:
      return env.list_entry(node, evaluate(*node.lhs, env));
    default:
      return env.binary(node.op, evaluate(*node.lhs, env), evaluate(*node.rhs, env));
  }
}

/// The arithmetic of plain numbers; division and remainder by zero give 0, so that a bad divisor is reported by the
/// constraint on it and not by a trap. Floor and ceiling are mathematical, also for negative numbers.
int64_t apply_dim_op(DimOp op, int64_t lhs, int64_t rhs);

}  // namespace polyop
