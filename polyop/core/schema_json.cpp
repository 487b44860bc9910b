// OpSchema::to_json: what hosts outside C++ generate their signatures, docs and shape functions from.
#include <cstdio>
#include <string>

#include "polyop/core/op_schema.h"

namespace polyop {
namespace {

std::string quoted(std::string_view text) {
  std::string result = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      result += '\\';
      result += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char escape[8];
      std::snprintf(escape, sizeof(escape), "\\u%04x", static_cast<unsigned>(c));
      result += escape;
    } else {
      result += c;
    }
  }
  return result + '"';
}

template <class Range, class Fn>
std::string list(const Range& range, Fn&& item_json) {
  std::string result = "[";
  for (const auto& item : range) {
    if (result.size() > 1) result += ",";
    result += item_json(item);
  }
  return result + "]";
}

std::string expression(const DimExpr::Node& node) {
  const auto pair = [&](std::string_view op) {
    return "[" + quoted(op) + "," + expression(*node.lhs) + "," + expression(*node.rhs) + "]";
  };
  const auto named = [&](std::string_view op) { return "[" + quoted(op) + "," + quoted(node.name) + "]"; };
  switch (node.op) {
    case DimOp::kConstant:
      return std::to_string(node.value);
    case DimOp::kSymbol:
      return named("symbol");
    case DimOp::kAttribute:
      return named("attribute");
    case DimOp::kListEntry:
      return "[\"list_entry\"," + quoted(node.name) + "," + expression(*node.lhs) + "]";
    case DimOp::kElement:
      return "[\"element\"," + quoted(node.name) + "," + std::to_string(node.value) + "]";
    case DimOp::kPackExtent:
      return named("pack_extent");
    case DimOp::kAxis:
      return "[\"axis\"]";
    case DimOp::kRank:
      return named("rank");
    case DimOp::kAdd:
      return pair("add");
    case DimOp::kSub:
      return pair("sub");
    case DimOp::kMul:
      return pair("mul");
    case DimOp::kFloorDiv:
      return pair("floor_div");
    case DimOp::kCeilDiv:
      return pair("ceil_div");
    case DimOp::kMod:
      return pair("mod");
    case DimOp::kMin:
      return pair("min");
    case DimOp::kMax:
      return pair("max");
  }
  return "null";
}

std::string condition(const std::optional<AttributeCondition>& value) {
  if (!value) return "null";
  const std::string wanted = value->choice.empty() ? std::to_string(value->integer) : quoted(value->choice);
  return "{\"attribute\":" + quoted(value->attribute) + ",\"equals\":" + wanted + "}";
}

std::string boolean(bool value) { return value ? "true" : "false"; }

std::string operand_json(const OperandSchema& operand) {
  constexpr std::string_view kRoles[] = {"input", "in_out", "output"};
  constexpr std::string_view kStrides[] = {"unit_last_axis", "contiguous", "any"};
  std::string json = "{\"name\":" + quoted(operand.name) + ",\"doc\":" + quoted(operand.doc);
  json += ",\"role\":" + quoted(kRoles[static_cast<int>(operand.role)]);
  json += ",\"strides\":" + quoted(kStrides[static_cast<int>(operand.stride_rule)]);
  json += ",\"shape_only\":" + boolean(operand.shape_only);
  json += ",\"alias_of\":" + quoted(operand.alias_of);
  json += ",\"presence\":" + list(operand.presence, [](const PresenceRule& rule) {
            return "{\"condition\":" + condition(rule.condition) + ",\"with\":" + quoted(rule.with) +
                   ",\"required\":" + boolean(rule.required) + "}";
          });
  json += ",\"shapes\":" + list(operand.shapes, [](const ShapeRule& rule) {
            return "{\"condition\":" + condition(rule.condition) + ",\"broadcast\":" + boolean(rule.broadcast) +
                   ",\"text\":" + quoted(rule.to_string()) + ",\"dims\":" +
                   list(rule.dims,
                        [](const Dim& dim) {
                          return "{\"pack\":" + quoted(dim.pack) + ",\"extent\":" + expression(dim.extent.node()) + "}";
                        }) +
                   "}";
          });
  json += ",\"dtypes\":" + list(operand.dtypes, [](const DTypeRule& rule) {
            return "{\"condition\":" + condition(rule.condition) + ",\"same_as\":" + quoted(rule.same_as) +
                   ",\"allowed\":" + list(rule.allowed, [](DType d) { return quoted(dtype_name(d)); }) + "}";
          });
  json += ",\"values\":" + list(operand.values, [](const ValueRule& rule) {
            return "{\"condition\":" + condition(rule.condition) + ",\"lowest\":" + expression(rule.lowest.node()) +
                   ",\"highest\":" + expression(rule.highest.node()) + ",\"cumulative\":" + boolean(rule.cumulative) +
                   ",\"first\":" + (rule.first ? expression(rule.first->node()) : "null") +
                   ",\"used\":" + (rule.used ? expression(rule.used->node()) : "null") + "}";
          });
  return json + "}";
}

std::string default_json(const AttributeSchema& attribute) {
  const AttributeValue& value = attribute.default_value;
  if (!value.present) return "null";
  switch (attribute.kind) {
    case AttributeKind::kInt:
      return std::to_string(value.integer);
    case AttributeKind::kBool:
      return boolean(value.integer != 0);
    case AttributeKind::kChoice:
      return quoted(attribute.choices[value.integer].name);
    case AttributeKind::kFloat: {
      char text[32];
      std::snprintf(text, sizeof(text), "%.17g", value.real);
      return text;
    }
    default:
      return "null";
  }
}

std::string attribute_json(const AttributeSchema& attribute) {
  constexpr std::string_view kKinds[] = {"int", "float", "bool", "choice", "int_list", "float_list", "bytes"};
  return "{\"name\":" + quoted(attribute.name) + ",\"doc\":" + quoted(attribute.doc) +
         ",\"kind\":" + quoted(kKinds[static_cast<int>(attribute.kind)]) +
         ",\"required\":" + boolean(attribute.required) + ",\"default\":" + default_json(attribute) +
         ",\"default_rsqrt\":" + (attribute.default_rsqrt ? expression(attribute.default_rsqrt->node()) : "null") +
         ",\"min\":" + (attribute.min_int ? std::to_string(*attribute.min_int) : "null") +
         ",\"max\":" + (attribute.max_int ? std::to_string(*attribute.max_int) : "null") + ",\"choices\":" +
         list(attribute.choices,
              [](const Choice& choice) {
                return "{\"name\":" + quoted(choice.name) +
                       ",\"number\":" + (choice.number ? std::to_string(*choice.number) : "null") + "}";
              }) +
         "}";
}

constexpr std::string_view kRelations[] = {"equal", "at_most", "multiple_of"};

std::string constraint_json(const Constraint& constraint) {
  return "{\"lhs\":" + expression(constraint.lhs.node()) +
         ",\"relation\":" + quoted(kRelations[static_cast<int>(constraint.relation)]) +
         ",\"rhs\":" + expression(constraint.rhs.node()) + ",\"operand\":" + quoted(constraint.blame_operand) +
         ",\"axis\":" + std::to_string(constraint.blame_axis) + "}";
}

std::string row_constraint_json(const RowConstraint& constraint) {
  return "{\"rows\":" + expression(constraint.rows.node()) + ",\"lhs\":" + expression(constraint.lhs.node()) +
         ",\"relation\":" + quoted(kRelations[static_cast<int>(constraint.relation)]) +
         ",\"rhs\":" + expression(constraint.rhs.node()) + ",\"operand\":" + quoted(constraint.blame_operand) + "}";
}

}  // namespace

std::string OpSchema::to_json() const {
  return "{\"name\":" + quoted(name_) + ",\"doc\":" + quoted(doc_) + ",\"operands\":" + list(operands_, operand_json) +
         ",\"attributes\":" + list(attributes_, attribute_json) +
         ",\"constraints\":" + list(constraints_, constraint_json) +
         ",\"row_constraints\":" + list(row_constraints_, row_constraint_json) +
         ",\"symbols\":" + list(symbols_, quoted) + "}";
}

}  // namespace polyop
