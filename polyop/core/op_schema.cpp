#include "polyop/core/op_schema.h"

#include <algorithm>
#include <utility>

namespace polyop {
namespace {

template <class Range, class Name>
int index_of(const Range& range, std::string_view wanted, Name&& name_of) {
  const auto found =
      std::find_if(range.begin(), range.end(), [&](const auto& item) { return name_of(item) == wanted; });
  return found == range.end() ? -1 : static_cast<int>(found - range.begin());
}

/// Turns the names inside one schema into indices and notes what cannot be resolved.
class NameResolver {
 public:
  NameResolver(const OpSchema& schema, std::vector<std::string>& defects) : schema_(schema), defects_(defects) {}

  void resolve(std::optional<AttributeCondition>& condition) {
    if (!condition) return;
    condition->slot = attribute_slot(condition->attribute);
    if (condition->slot < 0 || condition->choice.empty()) return;
    const AttributeSchema& attribute = schema_.attributes()[condition->slot];
    condition->integer = index_of(attribute.choices, condition->choice, [](const Choice& c) { return c.name; });
    if (condition->integer < 0) defects_.push_back(attribute.name + " has no choice " + condition->choice);
  }

  void resolve(DimExpr& expr) {
    expr = expr.resolved([this](const DimExpr::Node& node) -> int32_t {
      switch (node.op) {
        case DimOp::kSymbol:
          return checked(schema_.symbol_index(node.name), "symbol " + node.name + " is bound by no operand");
        case DimOp::kAttribute:
        case DimOp::kListEntry:
          return attribute_slot(node.name);
        case DimOp::kElement:
          return operand_slot(node.name);
        default:
          return checked(index_of(schema_.packs(), node.name, [](const std::string& s) { return s; }),
                         "pack " + node.name + " is bound by no operand");
      }
    });
  }

  int32_t attribute_slot(const std::string& name) {
    return checked(schema_.attribute_index(name), "no attribute is named " + name);
  }
  int32_t operand_slot(const std::string& name) {
    return checked(schema_.operand_index(name), "no operand is named " + name);
  }

 private:
  int32_t checked(int index, std::string defect) {
    if (index < 0) defects_.push_back(std::move(defect));
    return index;
  }

  const OpSchema& schema_;
  std::vector<std::string>& defects_;
};

void add_unique(std::vector<std::string>& names, const std::string& name) {
  if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
}

}  // namespace

AttributeValue AttributeValue::of_int(int64_t value) {
  AttributeValue result;
  result.present = true;
  result.integer = value;
  return result;
}
AttributeValue AttributeValue::of_float(double value) {
  AttributeValue result;
  result.present = true;
  result.kind = AttributeKind::kFloat;
  result.real = value;
  return result;
}
AttributeValue AttributeValue::of_bool(bool value) {
  AttributeValue result = of_int(value ? 1 : 0);
  result.kind = AttributeKind::kBool;
  return result;
}
AttributeValue AttributeValue::of_text(std::string_view value) {
  AttributeValue result;
  result.present = true;
  result.kind = AttributeKind::kChoice;
  result.text = value;
  return result;
}
AttributeValue AttributeValue::of_ints(std::span<const int64_t> values) {
  AttributeValue result;
  result.present = true;
  result.kind = AttributeKind::kIntList;
  result.integers = values;
  return result;
}
AttributeValue AttributeValue::of_floats(std::span<const double> values) {
  AttributeValue result;
  result.present = true;
  result.kind = AttributeKind::kFloatList;
  result.reals = values;
  return result;
}

std::string AttributeCondition::to_string() const {
  return attribute + " = " + (choice.empty() ? (integer != 0 ? "true" : "false") : choice);
}

AttributeCondition when(std::string attribute, std::string choice) {
  return {.attribute = std::move(attribute), .choice = std::move(choice), .integer = 0, .slot = -1};
}

Dim axes(std::string name) {
  DimExpr extent = pack_extent(name);
  return {std::move(extent), std::move(name)};
}
Dim map_axes(std::string name, DimExpr per_axis) { return {std::move(per_axis), std::move(name)}; }

std::string ShapeRule::to_string() const {
  std::string result = "[";
  for (const Dim& dim : dims) {
    if (result.size() > 1) result += ", ";
    result += dim.pack.empty() ? dim.extent.to_string() : dim.extent.to_string() + "...";
  }
  return result + "]";
}

// ---------------------------------------------------------------------------------------------------------------------
// OperandBuilder

OperandBuilder::OperandBuilder(std::string name, OperandRole role) {
  operand_.name = std::move(name);
  operand_.role = role;
}
OperandBuilder& OperandBuilder::doc(std::string text) {
  operand_.doc = std::move(text);
  return *this;
}
OperandBuilder& OperandBuilder::dims(std::vector<Dim> dims) {
  operand_.shapes.push_back({.condition = std::nullopt, .dims = std::move(dims), .broadcast = false});
  return *this;
}
OperandBuilder& OperandBuilder::dims_when(AttributeCondition condition, std::vector<Dim> dims) {
  operand_.shapes.push_back({.condition = std::move(condition), .dims = std::move(dims), .broadcast = false});
  return *this;
}
OperandBuilder& OperandBuilder::broadcast_dims(std::vector<Dim> dims) {
  operand_.shapes.push_back({.condition = std::nullopt, .dims = std::move(dims), .broadcast = true});
  return *this;
}
OperandBuilder& OperandBuilder::broadcast_dims_when(AttributeCondition condition, std::vector<Dim> dims) {
  operand_.shapes.push_back({.condition = std::move(condition), .dims = std::move(dims), .broadcast = true});
  return *this;
}
OperandBuilder& OperandBuilder::dtypes(std::vector<DType> allowed) {
  operand_.dtypes.push_back({.condition = std::nullopt, .allowed = std::move(allowed), .same_as = {}});
  return *this;
}
OperandBuilder& OperandBuilder::dtypes_when(AttributeCondition condition, std::vector<DType> allowed) {
  operand_.dtypes.push_back({.condition = std::move(condition), .allowed = std::move(allowed), .same_as = {}});
  return *this;
}
OperandBuilder& OperandBuilder::dtype_of(std::string operand) { return dtypes_or_that_of({}, std::move(operand)); }
OperandBuilder& OperandBuilder::dtypes_or_that_of(std::vector<DType> allowed, std::string operand) {
  operand_.dtypes.push_back({.condition = std::nullopt, .allowed = std::move(allowed), .same_as = std::move(operand)});
  return *this;
}
OperandBuilder& OperandBuilder::optional() {
  operand_.presence.push_back({.condition = std::nullopt, .with = {}, .required = false});
  return *this;
}
OperandBuilder& OperandBuilder::optional_when(AttributeCondition condition) {
  operand_.presence.push_back({.condition = std::move(condition), .with = {}, .required = false});
  return *this;
}
OperandBuilder& OperandBuilder::required_when(AttributeCondition condition) {
  operand_.presence.push_back({.condition = std::move(condition), .with = {}, .required = true});
  return *this;
}
OperandBuilder& OperandBuilder::present_with(std::string operand) {
  operand_.presence.push_back({.condition = std::nullopt, .with = std::move(operand), .required = true});
  return *this;
}
OperandBuilder& OperandBuilder::values(DimExpr lowest, DimExpr highest) {
  operand_.values.push_back({.condition = std::nullopt,
                             .lowest = std::move(lowest),
                             .highest = std::move(highest),
                             .used = std::nullopt,
                             .first = std::nullopt,
                             .cumulative = false});
  return *this;
}
OperandBuilder& OperandBuilder::values_when(AttributeCondition condition, DimExpr lowest, DimExpr highest) {
  values(std::move(lowest), std::move(highest));
  operand_.values.back().condition = std::move(condition);
  return *this;
}
OperandBuilder& OperandBuilder::cumulative(DimExpr highest) {
  values(0, std::move(highest));
  operand_.values.back().cumulative = true;
  return *this;
}
OperandBuilder& OperandBuilder::cumulative_when(AttributeCondition condition, DimExpr highest) {
  cumulative(std::move(highest));
  operand_.values.back().condition = std::move(condition);
  return *this;
}
OperandBuilder& OperandBuilder::used_values(DimExpr lowest, DimExpr highest, DimExpr used) {
  values(std::move(lowest), std::move(highest));
  operand_.values.back().used = std::move(used);
  return *this;
}
OperandBuilder& OperandBuilder::used_values_when(AttributeCondition condition, DimExpr lowest, DimExpr highest,
                                                 DimExpr first, DimExpr used) {
  values_when(std::move(condition), std::move(lowest), std::move(highest));
  operand_.values.back().first = std::move(first);
  operand_.values.back().used = std::move(used);
  return *this;
}
OperandBuilder& OperandBuilder::strides(StrideRule rule) {
  operand_.stride_rule = rule;
  return *this;
}
OperandBuilder& OperandBuilder::shape_only() {
  operand_.shape_only = true;
  return *this;
}
OperandBuilder& OperandBuilder::may_alias(std::string input) {
  operand_.alias_of = std::move(input);
  return *this;
}

OperandBuilder input(std::string name) { return {std::move(name), OperandRole::kInput}; }
OperandBuilder in_out(std::string name) { return {std::move(name), OperandRole::kInOut}; }
OperandBuilder output(std::string name) { return {std::move(name), OperandRole::kOutput}; }

// ---------------------------------------------------------------------------------------------------------------------
// OpSchema and SchemaBuilder

int OpSchema::operand_index(std::string_view name) const {
  return index_of(operands_, name, [](const OperandSchema& o) -> const std::string& { return o.name; });
}
int OpSchema::attribute_index(std::string_view name) const {
  return index_of(attributes_, name, [](const AttributeSchema& a) -> const std::string& { return a.name; });
}
int OpSchema::symbol_index(std::string_view name) const {
  return index_of(symbols_, name, [](const std::string& s) -> const std::string& { return s; });
}

SchemaBuilder::SchemaBuilder(std::string name, std::string doc) {
  schema_.name_ = std::move(name);
  schema_.doc_ = std::move(doc);
}

SchemaBuilder& SchemaBuilder::operand(OperandSchema operand) {
  // Symbols and packs are those that some operand binds: a plain symbol as an extent.
  for (const ShapeRule& rule : operand.shapes) {
    for (const Dim& dim : rule.dims) {
      if (dim.extent.is_symbol()) add_unique(schema_.symbols_, dim.extent.node().name);
      if (!dim.pack.empty()) add_unique(schema_.packs_, dim.pack);
    }
  }
  schema_.operands_.push_back(std::move(operand));
  return *this;
}

SchemaBuilder& SchemaBuilder::int_attribute(std::string name, std::optional<int64_t> default_value, std::string doc,
                                            std::optional<int64_t> min, std::optional<int64_t> max) {
  AttributeSchema attribute;
  attribute.name = std::move(name);
  attribute.doc = std::move(doc);
  attribute.required = !default_value.has_value();
  if (default_value) attribute.default_value = AttributeValue::of_int(*default_value);
  attribute.min_int = min;
  attribute.max_int = max;
  schema_.attributes_.push_back(std::move(attribute));
  return *this;
}
SchemaBuilder& SchemaBuilder::float_attribute(std::string name, std::optional<double> default_value, std::string doc) {
  AttributeSchema attribute;
  attribute.name = std::move(name);
  attribute.doc = std::move(doc);
  attribute.kind = AttributeKind::kFloat;
  attribute.required = !default_value.has_value();
  if (default_value) attribute.default_value = AttributeValue::of_float(*default_value);
  schema_.attributes_.push_back(std::move(attribute));
  return *this;
}
SchemaBuilder& SchemaBuilder::rsqrt_attribute(std::string name, DimExpr extent, std::string doc) {
  AttributeSchema attribute;
  attribute.name = std::move(name);
  attribute.doc = std::move(doc);
  attribute.kind = AttributeKind::kFloat;
  attribute.default_rsqrt = std::move(extent);
  schema_.attributes_.push_back(std::move(attribute));
  return *this;
}
SchemaBuilder& SchemaBuilder::bool_attribute(std::string name, bool default_value, std::string doc) {
  AttributeSchema attribute;
  attribute.name = std::move(name);
  attribute.doc = std::move(doc);
  attribute.kind = AttributeKind::kBool;
  attribute.default_value = AttributeValue::of_bool(default_value);
  schema_.attributes_.push_back(std::move(attribute));
  return *this;
}
SchemaBuilder& SchemaBuilder::choice_attribute(std::string name, std::vector<Choice> choices, std::string doc) {
  AttributeSchema attribute;
  attribute.name = std::move(name);
  attribute.doc = std::move(doc);
  attribute.kind = AttributeKind::kChoice;
  attribute.choices = std::move(choices);
  attribute.default_value = AttributeValue::of_int(0);
  attribute.default_value.kind = AttributeKind::kChoice;
  schema_.attributes_.push_back(std::move(attribute));
  return *this;
}
namespace {

AttributeSchema required_attribute(std::string name, AttributeKind kind, std::string doc) {
  AttributeSchema attribute;
  attribute.name = std::move(name);
  attribute.doc = std::move(doc);
  attribute.kind = kind;
  attribute.required = true;
  return attribute;
}

}  // namespace
SchemaBuilder& SchemaBuilder::int_list_attribute(std::string name, std::string doc) {
  schema_.attributes_.push_back(required_attribute(std::move(name), AttributeKind::kIntList, std::move(doc)));
  return *this;
}
SchemaBuilder& SchemaBuilder::float_list_attribute(std::string name, std::string doc) {
  schema_.attributes_.push_back(required_attribute(std::move(name), AttributeKind::kFloatList, std::move(doc)));
  return *this;
}
SchemaBuilder& SchemaBuilder::bytes_attribute(std::string name, std::string doc) {
  schema_.attributes_.push_back(required_attribute(std::move(name), AttributeKind::kBytes, std::move(doc)));
  return *this;
}

SchemaBuilder& SchemaBuilder::constrain(DimExpr lhs, Relation relation, DimExpr rhs, std::string blame_operand,
                                        int blame_axis) {
  schema_.constraints_.push_back({.lhs = std::move(lhs),
                                  .relation = relation,
                                  .rhs = std::move(rhs),
                                  .blame_operand = std::move(blame_operand),
                                  .blame_axis = blame_axis});
  return *this;
}

SchemaBuilder& SchemaBuilder::constrain_rows(DimExpr rows, DimExpr lhs, Relation relation, DimExpr rhs,
                                             std::string blame_operand) {
  schema_.row_constraints_.push_back({.rows = std::move(rows),
                                      .lhs = std::move(lhs),
                                      .relation = relation,
                                      .rhs = std::move(rhs),
                                      .blame_operand = std::move(blame_operand)});
  return *this;
}

OpSchema SchemaBuilder::build() const {
  OpSchema schema = schema_;
  NameResolver resolver(schema_, schema.defects_);
  const auto resolve_all = [&resolver](auto& rules) {
    for (auto& rule : rules) resolver.resolve(rule.condition);
  };
  for (OperandSchema& operand : schema.operands_) {
    resolve_all(operand.shapes);
    resolve_all(operand.dtypes);
    resolve_all(operand.presence);
    resolve_all(operand.values);
    for (ShapeRule& rule : operand.shapes) {
      for (Dim& dim : rule.dims) resolver.resolve(dim.extent);
    }
    for (DTypeRule& rule : operand.dtypes) {
      if (!rule.same_as.empty()) rule.same_as_slot = resolver.operand_slot(rule.same_as);
    }
    for (PresenceRule& rule : operand.presence) {
      if (!rule.with.empty()) rule.with_slot = resolver.operand_slot(rule.with);
    }
    for (ValueRule& rule : operand.values) {
      resolver.resolve(rule.lowest);
      resolver.resolve(rule.highest);
      if (rule.used) resolver.resolve(*rule.used);
      if (rule.first) resolver.resolve(*rule.first);
    }
    if (!operand.alias_of.empty()) operand.alias_slot = resolver.operand_slot(operand.alias_of);
    if (operand.shapes.empty()) schema.defects_.push_back(operand.name + " has no shape");
    if (operand.dtypes.empty()) schema.defects_.push_back(operand.name + " has no dtype");
  }
  for (AttributeSchema& attribute : schema.attributes_) {
    if (attribute.default_rsqrt) resolver.resolve(*attribute.default_rsqrt);
  }
  for (Constraint& constraint : schema.constraints_) {
    resolver.resolve(constraint.lhs);
    resolver.resolve(constraint.rhs);
    constraint.blame_slot = resolver.operand_slot(constraint.blame_operand);
  }
  for (RowConstraint& constraint : schema.row_constraints_) {
    resolver.resolve(constraint.rows);
    resolver.resolve(constraint.lhs);
    resolver.resolve(constraint.rhs);
    constraint.blame_slot = resolver.operand_slot(constraint.blame_operand);
  }
  if (schema.operands_.size() > kMaxOperands) schema.defects_.push_back("too many operands");
  if (schema.symbols_.size() > kMaxSymbols) schema.defects_.push_back("too many symbols");
  if (schema.attributes_.size() > kMaxAttributes) schema.defects_.push_back("too many attributes");
  if (schema.packs_.size() > 1) schema.defects_.push_back("more than one pack of axes");
  return schema;
}

}  // namespace polyop
