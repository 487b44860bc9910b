// OpSchema: everything the outside needs to know about an operator, written once. Argument checks, error texts, torch
// signatures and fakes, output shapes, test sweeps and the operator tables in the docs all read it.
//
// A schema is built with SchemaBuilder (see ops/circular_pad for the smallest example):
//   SchemaBuilder("scale_rows", "Multiplies each row by its factor.")
//       .operand(input("x").dims({symbol("M"), symbol("K")}).dtypes({DType::kF32, DType::kF16}))
//       .operand(input("factor").dims({symbol("M")}).dtype_of("x"))
//       .operand(output("out").dims({symbol("M"), symbol("K")}).dtype_of("x"))
//       .build();
#pragma once

#include <concepts>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "polyop/core/dim_expr.h"
#include "polyop/core/dtype.h"

namespace polyop {

// ---------------------------------------------------------------------------------------------------------------------
// Attributes

enum class AttributeKind : uint8_t { kInt, kFloat, kBool, kChoice, kIntList, kFloatList, kBytes };

/// A value as a caller gives it and as a kernel reads it. Lists, texts and bytes are borrowed. A kChoice attribute
/// holds its text from the caller, and after binding the index of the choice in `integer`.
struct AttributeValue {
  bool present = false;
  AttributeKind kind = AttributeKind::kInt;
  int64_t integer = 0;  // kInt, kBool (0 or 1), kChoice (index, or the caller's number for a choice)
  double real = 0.0;
  std::string_view text;  // kChoice, kBytes
  std::span<const int64_t> integers;
  std::span<const double> reals;

  static AttributeValue of_int(int64_t value);
  static AttributeValue of_float(double value);
  static AttributeValue of_bool(bool value);
  static AttributeValue of_text(std::string_view value);
  static AttributeValue of_ints(std::span<const int64_t> values);
  static AttributeValue of_floats(std::span<const double> values);
};

/// One legal text of a kChoice attribute, and the number that some outside formats write instead (ONNX: 17 for "fp8").
struct Choice {
  std::string name;
  std::optional<int64_t> number;
};

struct AttributeSchema {
  std::string name;
  std::string doc;
  AttributeKind kind = AttributeKind::kInt;
  bool required = false;
  AttributeValue default_value;  // used when absent and not required; absent itself: the attribute may stay absent
  std::optional<DimExpr> default_rsqrt;  // kFloat: the default is 1 / sqrt(this)
  std::vector<Choice> choices;           // kChoice, first one is the default
  std::optional<int64_t> min_int;
  std::optional<int64_t> max_int;
};

/// Holds while the attribute has this value (index for a choice, 0/1 for a bool).
struct AttributeCondition {
  std::string attribute;
  std::string choice;   // kChoice: the text; empty for bool and int attributes
  int64_t integer = 0;  // bool and int attributes; for a choice its index, set by build()
  int32_t slot = -1;    // index of the attribute, set by build()

  [[nodiscard]] std::string to_string() const;
};

AttributeCondition when(std::string attribute, std::string choice);
/// For a bool attribute. A template, so that a choice written as a literal never converts to bool.
template <std::same_as<bool> Bool>
AttributeCondition when(std::string attribute, Bool value) {
  return {.attribute = std::move(attribute), .choice = {}, .integer = value ? 1 : 0, .slot = -1};
}

// ---------------------------------------------------------------------------------------------------------------------
// Operands

enum class OperandRole : uint8_t { kInput, kInOut, kOutput };

/// One axis, or (pack) any number of axes with the extent given per axis.
struct Dim {
  DimExpr extent;
  std::string pack;  // name of the pack; empty for a single axis

  Dim(DimExpr expr) : extent(std::move(expr)) {}  // NOLINT(google-explicit-constructor)
  Dim(int64_t constant) : extent(constant) {}     // NOLINT(google-explicit-constructor)
  Dim(int constant) : extent(constant) {}         // NOLINT(google-explicit-constructor)
  Dim(DimExpr expr, std::string pack_name) : extent(std::move(expr)), pack(std::move(pack_name)) {}
};

/// Any number of axes. On an input it binds the extents to `name`.
Dim axes(std::string name);
/// As many axes as the pack `name` has, each with the extent that `per_axis` gives (pack_extent, pack_axis, pack_rank).
Dim map_axes(std::string name, DimExpr per_axis);

/// A shape that an operand may have. Rules are tried in order; those whose condition does not hold are passed over, and
/// among the others the first with the tensor's rank counts.
struct ShapeRule {
  std::optional<AttributeCondition> condition;
  std::vector<Dim> dims;
  // Right-aligned; leading axes may be missing and each axis may be 1. A symbol that no other shape binds takes the
  // extent of its axis here, unless that is 1.
  bool broadcast = false;

  [[nodiscard]] std::string to_string() const;
};

/// dtypes that an operand may have while the condition holds: one of `allowed`, or that of operand `same_as`.
struct DTypeRule {
  std::optional<AttributeCondition> condition;
  std::vector<DType> allowed;
  std::string same_as;
  int32_t same_as_slot = -1;  // set by build()
};

/// While the condition holds the operand must (required) or may be given. No rule holds: it must be absent.
struct PresenceRule {
  std::optional<AttributeCondition> condition;
  std::string with;  // operand whose presence this one follows: given exactly when that one is
  bool required = true;
  int32_t with_slot = -1;  // set by build()
};

/// Legal values of an integer operand. Checked where the data is host-visible; a CUDA kernel checks its own accesses.
struct ValueRule {
  std::optional<AttributeCondition> condition;
  DimExpr lowest = 0;
  DimExpr highest = 0;
  std::optional<DimExpr> used;   // rank 2: only entries [first, used) of row b are read (element() sees row b)
  std::optional<DimExpr> first;  // absent: 0
  bool cumulative = false;       // rank 1: starts at 0, never decreases, ends at most at `highest`
};

enum class StrideRule : uint8_t {
  kUnitLastAxis,  // the last axis is dense, the others may have any stride
  kContiguous,
  kAny,
};

struct OperandSchema {
  std::string name;
  std::string doc;
  OperandRole role = OperandRole::kInput;
  StrideRule stride_rule = StrideRule::kUnitLastAxis;
  bool shape_only = false;             // only the extents carry meaning; the data pointer may be null
  std::string alias_of;                // output: may be the very memory of this input (same view), and of no other
  int32_t alias_slot = -1;             // set by build()
  std::vector<PresenceRule> presence;  // empty: always required
  std::vector<ShapeRule> shapes;
  std::vector<DTypeRule> dtypes;
  std::vector<ValueRule> values;

  [[nodiscard]] bool always_required() const { return presence.empty(); }
  [[nodiscard]] bool is_written() const { return role != OperandRole::kInput; }
};

/// Fluent construction of an OperandSchema; converts to it.
class OperandBuilder {
 public:
  OperandBuilder(std::string name, OperandRole role);

  OperandBuilder& doc(std::string text);
  OperandBuilder& dims(std::vector<Dim> dims);
  OperandBuilder& dims_when(AttributeCondition condition, std::vector<Dim> dims);
  OperandBuilder& broadcast_dims(std::vector<Dim> dims);
  OperandBuilder& broadcast_dims_when(AttributeCondition condition, std::vector<Dim> dims);
  OperandBuilder& dtypes(std::vector<DType> allowed);
  OperandBuilder& dtypes_when(AttributeCondition condition, std::vector<DType> allowed);
  OperandBuilder& dtype_of(std::string operand);
  OperandBuilder& dtypes_or_that_of(std::vector<DType> allowed, std::string operand);
  OperandBuilder& optional();
  OperandBuilder& optional_when(AttributeCondition condition);
  OperandBuilder& required_when(AttributeCondition condition);
  OperandBuilder& present_with(std::string operand);
  OperandBuilder& values(DimExpr lowest, DimExpr highest);
  OperandBuilder& values_when(AttributeCondition condition, DimExpr lowest, DimExpr highest);
  OperandBuilder& cumulative(DimExpr highest);
  OperandBuilder& cumulative_when(AttributeCondition condition, DimExpr highest);
  OperandBuilder& used_values(DimExpr lowest, DimExpr highest, DimExpr used);
  OperandBuilder& used_values_when(AttributeCondition condition, DimExpr lowest, DimExpr highest, DimExpr first,
                                   DimExpr used);
  OperandBuilder& strides(StrideRule rule);
  OperandBuilder& shape_only();
  OperandBuilder& may_alias(std::string input);

  operator OperandSchema() const { return operand_; }  // NOLINT(google-explicit-constructor)

 private:
  OperandSchema operand_;
};

OperandBuilder input(std::string name);
OperandBuilder in_out(std::string name);
OperandBuilder output(std::string name);

// ---------------------------------------------------------------------------------------------------------------------
// Constraints

enum class Relation : uint8_t { kEqual, kAtMost, kMultipleOf };

/// lhs <relation> rhs must hold; the text of a violation starts at `blame` (operand and axis; a negative axis counts
/// from the last). A call in which the blamed operand or the operand that binds one of the symbols is absent is not
/// concerned.
struct Constraint {
  DimExpr lhs;
  Relation relation;
  DimExpr rhs;
  std::string blame_operand;
  int32_t blame_axis = 0;
  int32_t blame_slot = -1;  // set by build()
};

/// As Constraint, for each b below the extent `rows`: element() sees row b. Checked where the data is host-visible.
struct RowConstraint {
  DimExpr rows;
  DimExpr lhs;
  Relation relation;
  DimExpr rhs;
  std::string blame_operand;
  int32_t blame_slot = -1;  // set by build()
};

// ---------------------------------------------------------------------------------------------------------------------
// The schema

inline constexpr int kMaxOperands = 32;
inline constexpr int kMaxSymbols = 32;
inline constexpr int kMaxAttributes = 32;

/// Immutable description of one operator. Operands stand in call order; outputs come last.
class OpSchema {
 public:
  [[nodiscard]] const std::string& name() const { return name_; }
  [[nodiscard]] const std::string& doc() const { return doc_; }
  [[nodiscard]] std::span<const OperandSchema> operands() const { return operands_; }
  [[nodiscard]] std::span<const AttributeSchema> attributes() const { return attributes_; }
  [[nodiscard]] std::span<const Constraint> constraints() const { return constraints_; }
  [[nodiscard]] std::span<const RowConstraint> row_constraints() const { return row_constraints_; }
  [[nodiscard]] std::span<const std::string> symbols() const { return symbols_; }
  [[nodiscard]] std::span<const std::string> packs() const { return packs_; }

  /// Index of a name, or -1.
  [[nodiscard]] int operand_index(std::string_view name) const;
  [[nodiscard]] int attribute_index(std::string_view name) const;
  [[nodiscard]] int symbol_index(std::string_view name) const;

  /// What is wrong with the declaration itself (unknown names, too many operands); empty for every shipped operator.
  [[nodiscard]] std::span<const std::string> defects() const { return defects_; }

  /// The whole schema as JSON, expressions as nested lists (["add", ["symbol", "B"], 1]): what Python generates from.
  [[nodiscard]] std::string to_json() const;

 private:
  friend class SchemaBuilder;
  std::string name_;
  std::string doc_;
  std::vector<OperandSchema> operands_;
  std::vector<AttributeSchema> attributes_;
  std::vector<Constraint> constraints_;
  std::vector<RowConstraint> row_constraints_;
  std::vector<std::string> symbols_;
  std::vector<std::string> packs_;
  std::vector<std::string> defects_;
};

class SchemaBuilder {
 public:
  SchemaBuilder(std::string name, std::string doc);

  SchemaBuilder& operand(OperandSchema operand);
  SchemaBuilder& int_attribute(std::string name, std::optional<int64_t> default_value, std::string doc,
                               std::optional<int64_t> min = std::nullopt, std::optional<int64_t> max = std::nullopt);
  SchemaBuilder& float_attribute(std::string name, std::optional<double> default_value, std::string doc);
  /// A float whose default is 1 / sqrt(extent).
  SchemaBuilder& rsqrt_attribute(std::string name, DimExpr extent, std::string doc);
  SchemaBuilder& bool_attribute(std::string name, bool default_value, std::string doc);
  /// A text out of `choices`; the first is the default.
  SchemaBuilder& choice_attribute(std::string name, std::vector<Choice> choices, std::string doc);
  SchemaBuilder& int_list_attribute(std::string name, std::string doc);
  SchemaBuilder& float_list_attribute(std::string name, std::string doc);
  SchemaBuilder& bytes_attribute(std::string name, std::string doc);
  SchemaBuilder& constrain(DimExpr lhs, Relation relation, DimExpr rhs, std::string blame_operand, int blame_axis);
  SchemaBuilder& constrain_rows(DimExpr rows, DimExpr lhs, Relation relation, DimExpr rhs, std::string blame_operand);

  /// Resolves names to indices. A name that nothing declares is a bug of the operator: it is listed in defects(), and
  /// the registry refuses such a schema.
  [[nodiscard]] OpSchema build() const;

 private:
  OpSchema schema_;
};

}  // namespace polyop
