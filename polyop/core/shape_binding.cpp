#include "polyop/core/shape_binding.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <type_traits>
#include <utility>

#include "polyop/core/memory_overlap.h"

namespace polyop {
namespace {

using Operands = std::span<const TensorView* const>;

std::string device_name(Device device) {
  return device.type == DeviceType::kCpu ? "cpu" : "cuda:" + std::to_string(device.index);
}

/// "a, b or c"
template <class Range, class Name>
std::string alternatives(const Range& range, Name&& name_of) {
  std::string result;
  size_t left = std::size(range);
  for (const auto& item : range) {
    result += name_of(item);
    --left;
    if (left > 1) result += ", ";
    if (left == 1) result += " or ";
  }
  return result;
}

std::string shape_text(const TensorView& tensor) {
  std::string result = "[";
  for (int axis = 0; axis < tensor.rank; ++axis) {
    if (axis > 0) result += ", ";
    result += std::to_string(tensor.shape[axis]);
  }
  return result + "]";
}

/// Environment of evaluate() over the numbers of a call. `axis` walks the pack, `row` walks the rows of a value rule.
struct NumberEnv {
  using Value = int64_t;
  const BoundCall& call;
  int32_t axis = 0;
  int64_t row = 0;

  int64_t constant(int64_t value) const { return value; }
  int64_t leaf(const DimExpr::Node& node) const {
    switch (node.op) {
      case DimOp::kSymbol:
        return call.symbols[node.slot];
      case DimOp::kAttribute:
        return call.attributes[node.slot].integer;
      case DimOp::kPackExtent:
        return call.pack_extents[axis];
      case DimOp::kAxis:
        return axis;
      case DimOp::kRank:
        return call.pack_rank;
      case DimOp::kElement:
        return element(node);
      default:
        return 0;
    }
  }
  // An absent operand counts as zeros: an absent write position is position 0.
  int64_t element(const DimExpr::Node& node) const {
    const TensorView* tensor = call.operands[node.slot];
    if (tensor == nullptr || row + node.value >= tensor->shape[0]) return 0;
    const int64_t offset = (row + node.value) * tensor->strides[0];
    return tensor->dtype == DType::kI64 ? static_cast<const int64_t*>(tensor->data)[offset]
                                        : static_cast<const int32_t*>(tensor->data)[offset];
  }
  int64_t list_entry(const DimExpr::Node& node, int64_t index) const {
    const auto& list = call.attributes[node.slot].integers;
    return index >= 0 && index < static_cast<int64_t>(list.size()) ? list[index] : 0;
  }
  int64_t binary(DimOp op, int64_t lhs, int64_t rhs) const { return apply_dim_op(op, lhs, rhs); }

  int64_t operator()(const DimExpr& expr) {
    if (expr.is_symbol()) return call.symbols[expr.node().slot];
    return evaluate(expr.node(), *this);
  }
};

/// What is checked: a whole call, a call whose outputs do not exist yet, or what a graph knows about one.
enum class BindMode : uint8_t { kCall, kInputs, kGraph };

class Binder {
 public:
  Binder(const OpSchema& schema, Operands operands, BoundCall* call, BindMode mode)
      : schema_(schema),
        call_(*call),
        check_outputs_(mode == BindMode::kCall),
        is_graph_(mode == BindMode::kGraph),
        env_{.call = *call} {
    call_.schema = &schema;
    call_.operands = operands;
    call_.symbols.fill(BoundCall::kUnbound);
  }

  Status run(std::span<const AttributeValue> attributes) {
    if (call_.operands.size() != schema_.operands().size() || attributes.size() != schema_.attributes().size()) {
      return internal_error(schema_.name() + ": the host passed " + std::to_string(call_.operands.size()) +
                            " operands and " + std::to_string(attributes.size()) + " attributes, the schema has " +
                            std::to_string(schema_.operands().size()) + " and " +
                            std::to_string(schema_.attributes().size()));
    }
    POLYOP_RETURN_IF_ERROR(bind_attributes(attributes));
    POLYOP_RETURN_IF_ERROR(for_each_operand([this](int i) { return check_presence(i); }));
    POLYOP_RETURN_IF_ERROR(for_each_operand([this](int i) { return bind_symbols(i); }));
    POLYOP_RETURN_IF_ERROR(for_each_operand([this](int i) { return bind_symbols_of_sums(i); }));
    POLYOP_RETURN_IF_ERROR(for_each_operand([this](int i) { return bind_symbols_of_broadcasts(i); }));
    POLYOP_RETURN_IF_ERROR(fill_symbolic_defaults());
    POLYOP_RETURN_IF_ERROR(for_each_operand([this](int i) { return check_extents(i); }));
    POLYOP_RETURN_IF_ERROR(for_each_operand([this](int i) { return check_dtype(i); }));
    for (const Constraint& constraint : schema_.constraints()) POLYOP_RETURN_IF_ERROR(check(constraint));
    if (!is_graph_) POLYOP_RETURN_IF_ERROR(for_each_operand([this](int i) { return check_memory(i); }));
    if (is_graph_ || call_.device.type == DeviceType::kCpu) {
      POLYOP_RETURN_IF_ERROR(for_each_operand([this](int i) { return check_values(i); }));
      for (const RowConstraint& rule : schema_.row_constraints()) POLYOP_RETURN_IF_ERROR(check_rows(rule));
    }
    return Status::ok();
  }

  /// Gives every symbol and every extent that the graph left open a value, and the outputs their shapes.
  void complete(GraphCall* result) {
    std::array<bool, kMaxSymbols> was_open{};
    for (size_t slot = 0; slot < schema_.symbols().size(); ++slot) {
      was_open[slot] = call_.symbols[slot] == BoundCall::kUnbound;
      if (was_open[slot]) call_.symbols[slot] = 1;
    }
    for (int i = 0; i < call_.pack_rank; ++i) call_.pack_extents[i] = std::max<int64_t>(call_.pack_extents[i], 0);
    for (const Constraint& constraint : schema_.constraints()) {
      if (constraint.relation != Relation::kMultipleOf || !constraint.lhs.is_symbol()) continue;
      const int slot = constraint.lhs.node().slot;
      if (was_open[slot]) call_.symbols[slot] = env_(constraint.rhs);
    }
    for (int i = 0; i < static_cast<int>(schema_.operands().size()); ++i) {
      const bool is_output = schema_.operands()[i].role == OperandRole::kOutput;
      TensorView& view = result->views[i];
      if (is_output) {
        const OutputShape shape = output_shape(i);
        if (!shape.present) continue;
        view = TensorView::contiguous(nullptr, shape.dtype, shape.extents.data(), shape.rank, call_.device);
      } else {
        if (!call_.has(i)) continue;
        view = completed(i);
      }
      result->operands[i] = &view;
    }
    call_.operands = std::span(result->operands).first(schema_.operands().size());
  }

  /// The output's shape under the bound symbols.
  OutputShape output_shape(int index) {
    const OperandSchema& operand = schema_.operands()[index];
    OutputShape result;
    const PresenceRule* rule = presence_rule(operand);
    result.present = operand.always_required() || (rule != nullptr && is_given(*rule));
    if (!result.present) return result;
    if (const ShapeRule* shape = shape_rule(operand, -1)) {
      for (const Dim& dim : shape->dims) {
        for (env_.axis = 0; env_.axis < extent_count(dim); ++env_.axis) {
          if (result.rank < kMaxRank) result.extents[result.rank++] = env_(dim.extent);
        }
      }
    }
    for (const DTypeRule& dtype : operand.dtypes) {
      if (!holds(dtype.condition)) continue;
      result.dtype = dtype.same_as_slot >= 0 ? call_.tensor(dtype.same_as_slot).dtype : dtype.allowed.front();
      break;
    }
    return result;
  }

 private:
  template <class Fn>
  Status for_each_operand(Fn&& fn) {
    for (int i = 0; i < static_cast<int>(schema_.operands().size()); ++i) {
      if (!check_outputs_ && schema_.operands()[i].role == OperandRole::kOutput) continue;
      POLYOP_RETURN_IF_ERROR(fn(i));
    }
    return Status::ok();
  }

  [[nodiscard]] bool holds(const std::optional<AttributeCondition>& condition) const {
    return !condition || call_.attributes[condition->slot].integer == condition->integer;
  }
  [[nodiscard]] bool is_given(const PresenceRule& rule) const {
    return rule.with_slot >= 0 ? call_.has(rule.with_slot) : rule.required;
  }
  [[nodiscard]] const PresenceRule* presence_rule(const OperandSchema& operand) const {
    for (const PresenceRule& rule : operand.presence) {
      if (holds(rule.condition)) return &rule;
    }
    return nullptr;
  }
  [[nodiscard]] int extent_count(const Dim& dim) const { return dim.pack.empty() ? 1 : call_.pack_rank; }

  /// The shape rule in force for a tensor of this rank (-1: any), or null.
  [[nodiscard]] const ShapeRule* shape_rule(const OperandSchema& operand, int rank) const {
    for (const ShapeRule& rule : operand.shapes) {
      if (!holds(rule.condition)) continue;
      const bool has_pack =
          has_packs_ && std::any_of(rule.dims.begin(), rule.dims.end(), [](const Dim& d) { return !d.pack.empty(); });
      const int fixed = static_cast<int>(rule.dims.size()) - (has_pack ? 1 : 0);
      const bool fits = rank < 0 || (rule.broadcast ? rank <= fixed : has_pack ? rank >= fixed : rank == fixed);
      if (fits) return &rule;
    }
    return nullptr;
  }

  std::string at(int index) const { return schema_.name() + ": " + schema_.operands()[index].name; }
  std::string at(int index, int axis) const { return at(index) + " axis " + std::to_string(axis); }

  // ------------------------------------------------------------------------------------------------------------------
  Status bind_attributes(std::span<const AttributeValue> given) {
    for (size_t i = 0; i < given.size(); ++i) {
      const AttributeSchema& attribute = schema_.attributes()[i];
      AttributeValue& value = call_.attributes[i];
      if (!given[i].present) {
        if (attribute.required) return invalid_argument(attribute_text(attribute) + " is missing");
        value = attribute.default_value;
        continue;
      }
      value = given[i];
      POLYOP_RETURN_IF_ERROR(convert(attribute, &value));
    }
    return Status::ok();
  }

  std::string attribute_text(const AttributeSchema& attribute) const {
    return schema_.name() + ": attribute " + attribute.name;
  }

  /// Brings a given value to the attribute's kind: whole numbers serve as floats and bools, numbers as choices.
  Status convert(const AttributeSchema& attribute, AttributeValue* value) const {
    const bool is_whole = value->kind == AttributeKind::kInt || value->kind == AttributeKind::kBool;
    switch (attribute.kind) {
      case AttributeKind::kInt:
        if (!is_whole) return wrong_kind(attribute, "an integer");
        if ((attribute.min_int && value->integer < *attribute.min_int) ||
            (attribute.max_int && value->integer > *attribute.max_int)) {
          std::string wanted = attribute.min_int ? "at least " + std::to_string(*attribute.min_int) : "";
          if (attribute.max_int)
            wanted += (wanted.empty() ? "" : " and ") + ("at most " + std::to_string(*attribute.max_int));
          return invalid_argument(attribute_text(attribute) + " is " + std::to_string(value->integer) + ", wanted " +
                                  wanted);
        }
        break;
      case AttributeKind::kFloat:
        if (is_whole) value->real = static_cast<double>(value->integer);
        if (!is_whole && value->kind != AttributeKind::kFloat) return wrong_kind(attribute, "a number");
        break;
      case AttributeKind::kBool:
        if (!is_whole || (value->integer != 0 && value->integer != 1)) return wrong_kind(attribute, "true or false");
        break;
      case AttributeKind::kChoice:
        return convert_choice(attribute, value);
      case AttributeKind::kIntList:
        if (value->kind != AttributeKind::kIntList) return wrong_kind(attribute, "a list of integers");
        break;
      case AttributeKind::kFloatList:
        if (value->kind != AttributeKind::kFloatList) return wrong_kind(attribute, "a list of numbers");
        break;
      case AttributeKind::kBytes:
        if (value->kind != AttributeKind::kChoice && value->kind != AttributeKind::kBytes) {
          return wrong_kind(attribute, "bytes");
        }
        break;
    }
    value->kind = attribute.kind;
    return Status::ok();
  }

  Status wrong_kind(const AttributeSchema& attribute, std::string_view wanted) const {
    return invalid_argument(attribute_text(attribute) + " has the wrong kind of value, wanted " + std::string(wanted));
  }

  Status convert_choice(const AttributeSchema& attribute, AttributeValue* value) const {
    for (size_t index = 0; index < attribute.choices.size(); ++index) {
      const Choice& choice = attribute.choices[index];
      const bool by_name = value->kind == AttributeKind::kChoice && value->text == choice.name;
      const bool by_number = value->kind == AttributeKind::kInt && choice.number == value->integer;
      if (!by_name && !by_number) continue;
      value->kind = AttributeKind::kChoice;
      value->integer = static_cast<int64_t>(index);
      return Status::ok();
    }
    const std::string got =
        value->kind == AttributeKind::kChoice ? '"' + std::string(value->text) + '"' : std::to_string(value->integer);
    return invalid_argument(attribute_text(attribute) + " is " + got + ", wanted " +
                            alternatives(attribute.choices, [](const Choice& c) {
                              return c.number ? c.name + " (" + std::to_string(*c.number) + ")" : c.name;
                            }));
  }

  Status fill_symbolic_defaults() {
    for (size_t i = 0; i < schema_.attributes().size(); ++i) {
      const AttributeSchema& attribute = schema_.attributes()[i];
      if (attribute.default_rsqrt && !call_.attributes[i].present) {
        if (!is_bound(attribute.default_rsqrt->node())) {  // a graph that leaves it open: any factor serves
          call_.attributes[i] = AttributeValue::of_float(1.0);
          continue;
        }
        call_.attributes[i] =
            AttributeValue::of_float(1.0 / std::sqrt(static_cast<double>(env_(*attribute.default_rsqrt))));
      }
    }
    return Status::ok();
  }

  // ------------------------------------------------------------------------------------------------------------------
  Status check_presence(int index) {
    const OperandSchema& operand = schema_.operands()[index];
    const bool given = call_.has(index);
    if (operand.always_required()) return given ? Status::ok() : invalid_argument(at(index) + " is missing");
    const PresenceRule* rule = presence_rule(operand);
    if (rule == nullptr) {
      if (!given) return Status::ok();
      std::string conditions = alternatives(
          operand.presence, [](const PresenceRule& r) { return r.condition ? r.condition->to_string() : ""; });
      return invalid_argument(at(index) + " is given, but belongs only to " + conditions);
    }
    if (rule->with_slot >= 0 && given != call_.has(rule->with_slot)) {
      return invalid_argument(at(index) + (given ? " is given without " : " is missing beside ") + rule->with);
    }
    if (rule->with_slot < 0 && rule->required && !given) {
      return invalid_argument(at(index) + " is missing" +
                              (rule->condition ? "; it is required when " + rule->condition->to_string() : ""));
    }
    return Status::ok();
  }

  /// Binds every extent that the schema gives as a plain symbol, and the pack. Two operands that disagree are an error.
  Status bind_symbols(int index) {
    if (!call_.has(index)) return Status::ok();
    const OperandSchema& operand = schema_.operands()[index];
    const TensorView& tensor = call_.tensor(index);
    if (!have_device_) {
      call_.device = tensor.device;
      device_from_ = index;
      have_device_ = true;
    } else if (tensor.device != call_.device) {
      return invalid_argument(at(index) + " is on " + device_name(tensor.device) + ", wanted " +
                              device_name(call_.device) + " as " + schema_.operands()[device_from_].name);
    }
    if (is_graph_ && tensor.rank == kUnknownRank) return Status::ok();
    for (int axis = 0; axis < tensor.rank; ++axis) {
      if (is_open(tensor, axis)) continue;
      if (tensor.shape[axis] < 0) return invalid_argument(at(index, axis) + " is negative");
    }
    const ShapeRule* rule = shape_rule(operand, tensor.rank);
    if (rule == nullptr) return wrong_rank(index);
    if (rule->broadcast) return Status::ok();
    const int pack_size = tensor.rank - static_cast<int>(rule->dims.size()) + 1;
    int axis = 0;
    for (const Dim& dim : rule->dims) {
      if (!dim.pack.empty()) {
        if (!have_pack_ && dim.extent.node().op == DimOp::kPackExtent) {
          have_pack_ = true;
          call_.pack_rank = pack_size;
          for (int i = 0; i < pack_size; ++i) call_.pack_extents[i] = tensor.shape[axis + i];
        } else if (pack_size != call_.pack_rank) {
          return invalid_argument(at(index) + " has rank " + std::to_string(tensor.rank) + ", wanted " +
                                  std::to_string(tensor.rank - pack_size + call_.pack_rank));
        }
        axis += pack_size;
        continue;
      }
      if (dim.extent.is_symbol() && !is_open(tensor, axis)) {
        const int slot = dim.extent.node().slot;
        if (call_.symbols[slot] == BoundCall::kUnbound) {
          call_.symbols[slot] = tensor.shape[axis];
          origins_[slot] = {index, axis};
        } else if (call_.symbols[slot] != tensor.shape[axis]) {
          const auto [from, from_axis] = origins_[slot];
          return invalid_argument(at(index, axis) + " (" + schema_.symbols()[slot] + ") is " +
                                  std::to_string(tensor.shape[axis]) + ", wanted " +
                                  std::to_string(call_.symbols[slot]) + " as in " + schema_.operands()[from].name +
                                  " axis " + std::to_string(from_axis));
        }
      }
      ++axis;
    }
    return Status::ok();
  }

  /// Binds the symbol of an extent `symbol + constant` (B + 1 offsets) where no plain extent did.
  Status bind_symbols_of_sums(int index) {
    if (!has_shape(index)) return Status::ok();
    const TensorView& tensor = call_.tensor(index);
    const ShapeRule& rule = *shape_rule(schema_.operands()[index], tensor.rank);
    if (rule.broadcast || static_cast<int>(rule.dims.size()) != tensor.rank) return Status::ok();
    for (int axis = 0; axis < tensor.rank; ++axis) {
      const DimExpr::Node& node = rule.dims[axis].extent.node();
      if (node.op != DimOp::kAdd || node.lhs->op != DimOp::kSymbol || node.rhs->op != DimOp::kConstant) continue;
      if (call_.symbols[node.lhs->slot] != BoundCall::kUnbound || is_open(tensor, axis)) continue;
      if (tensor.shape[axis] < node.rhs->value) {
        return invalid_argument(at(index, axis) + " (" + rule.dims[axis].extent.to_string() + ") is " +
                                std::to_string(tensor.shape[axis]) + ", wanted at least " +
                                std::to_string(node.rhs->value));
      }
      call_.symbols[node.lhs->slot] = tensor.shape[axis] - node.rhs->value;
      origins_[node.lhs->slot] = {index, axis};
    }
    return Status::ok();
  }

  /// Binds a symbol that stands only in shapes that broadcast, from an axis that is not 1.
  Status bind_symbols_of_broadcasts(int index) {
    if (!has_shape(index)) return Status::ok();
    const auto& shapes = schema_.operands()[index].shapes;
    if (std::none_of(shapes.begin(), shapes.end(), [](const ShapeRule& r) { return r.broadcast; })) return Status::ok();
    const TensorView& tensor = call_.tensor(index);
    const ShapeRule& rule = *shape_rule(schema_.operands()[index], tensor.rank);
    if (!rule.broadcast) return Status::ok();
    const int missing = static_cast<int>(rule.dims.size()) - tensor.rank;
    for (int axis = 0; axis < tensor.rank; ++axis) {
      const DimExpr& extent = rule.dims[axis + missing].extent;
      if (!extent.is_symbol() || tensor.shape[axis] == 1 || is_open(tensor, axis)) continue;
      int64_t& bound = call_.symbols[extent.node().slot];
      if (bound == BoundCall::kUnbound) bound = tensor.shape[axis];
    }
    return Status::ok();
  }

  /// Whether the operand is given and its rank is known.
  [[nodiscard]] bool has_shape(int index) const { return call_.has(index) && call_.tensor(index).rank != kUnknownRank; }
  /// Whether the graph leaves the extent open.
  [[nodiscard]] bool is_open(const TensorView& tensor, int axis) const {
    return is_graph_ && tensor.shape[axis] == kUnknownExtent;
  }
  /// Whether the graph leaves an extent of the pack open.
  [[nodiscard]] bool pack_is_open() const {
    const auto begin = call_.pack_extents.cbegin();
    return is_graph_ && std::find(begin, begin + call_.pack_rank, kUnknownExtent) != begin + call_.pack_rank;
  }

  /// A given operand with every extent known, under symbols that are all bound.
  TensorView completed(int index) {
    const TensorView& tensor = call_.tensor(index);
    const ShapeRule* rule = shape_rule(schema_.operands()[index], tensor.rank);
    std::array<int64_t, kMaxRank> extents{};
    int rank = 0;
    if (tensor.rank != kUnknownRank) {
      rank = tensor.rank;
      extents = tensor.shape;
    } else if (rule != nullptr) {
      rank = static_cast<int>(rule->dims.size());
      extents.fill(kUnknownExtent);
    }
    for (int axis = 0; axis < rank; ++axis) {
      if (extents[axis] != kUnknownExtent) continue;
      extents[axis] = rule->broadcast || !rule->dims[axis].pack.empty() ? 1 : env_(rule->dims[axis].extent);
    }
    return TensorView::contiguous(tensor.data, tensor.dtype, extents.data(), rank, tensor.device);
  }

  Status wrong_rank(int index) const {
    const OperandSchema& operand = schema_.operands()[index];
    std::string wanted;
    for (const ShapeRule& rule : operand.shapes) {
      if (!holds(rule.condition)) continue;
      if (!wanted.empty()) wanted += " or ";
      wanted += (rule.broadcast ? "at most " : "") + rule.to_string();
      if (rule.condition) wanted += " (" + rule.condition->to_string() + ")";
    }
    const TensorView& tensor = call_.tensor(index);
    return invalid_argument(at(index) + " has rank " + std::to_string(tensor.rank) + " " + shape_text(tensor) +
                            ", wanted " + (wanted.empty() ? "no such operand here" : wanted));
  }

  /// Checks the extents that are expressions or broadcast, now that all symbols are bound.
  Status check_extents(int index) {
    if (!has_shape(index)) return Status::ok();
    const TensorView& tensor = call_.tensor(index);
    const ShapeRule& rule = *shape_rule(schema_.operands()[index], tensor.rank);
    int axis = 0;
    auto dim = rule.dims.begin() + (rule.broadcast ? static_cast<int>(rule.dims.size()) - tensor.rank : 0);
    for (; dim != rule.dims.end(); ++dim) {
      if (!rule.broadcast && dim->extent.is_symbol()) {  // compared when it was bound
        ++axis;
        continue;
      }
      for (env_.axis = 0; env_.axis < extent_count(*dim); ++env_.axis, ++axis) {
        if (rule.broadcast && tensor.shape[axis] == 1) continue;
        if (is_graph_ && (is_open(tensor, axis) || !is_bound(dim->extent.node()) || pack_is_open())) continue;
        const int64_t wanted = env_(dim->extent);
        if (tensor.shape[axis] == wanted) continue;
        return invalid_argument(at(index, axis) + " (" + dim->extent.to_string() + ") is " +
                                std::to_string(tensor.shape[axis]) + ", wanted " + std::to_string(wanted) +
                                (rule.broadcast && wanted != 1 ? " or 1" : ""));
      }
    }
    return Status::ok();
  }

  Status check_dtype(int index) {
    if (!call_.has(index)) return Status::ok();
    const OperandSchema& operand = schema_.operands()[index];
    const DType dtype = call_.tensor(index).dtype;
    for (const DTypeRule& rule : operand.dtypes) {
      if (!holds(rule.condition)) continue;
      const bool same_is_given = rule.same_as_slot >= 0 && call_.has(rule.same_as_slot);
      if (same_is_given && dtype == call_.tensor(rule.same_as_slot).dtype) return Status::ok();
      if (std::find(rule.allowed.begin(), rule.allowed.end(), dtype) != rule.allowed.end()) return Status::ok();
      std::string wanted = alternatives(rule.allowed, [](DType d) { return std::string(dtype_name(d)); });
      if (same_is_given) {
        wanted += (wanted.empty() ? "" : " or ") + std::string(dtype_name(call_.tensor(rule.same_as_slot).dtype)) +
                  " as " + rule.same_as;
      }
      return invalid_argument(at(index) + " is " + std::string(dtype_name(dtype)) + ", wanted " + wanted);
    }
    return Status::ok();
  }

  Status check(const Constraint& constraint) {
    if (!concerns_call(constraint) || is_met(constraint)) return Status::ok();
    const TensorView& blamed = call_.tensor(constraint.blame_slot);
    if (blamed.rank == kUnknownRank) return invalid_argument(at(constraint.blame_slot) + ": " + complaint(constraint));
    const int axis = constraint.blame_axis + (constraint.blame_axis < 0 ? blamed.rank : 0);
    return invalid_argument(at(constraint.blame_slot, axis) + " is " + std::to_string(blamed.shape[axis]) + "; " +
                            complaint(constraint));
  }

  Status check_rows(const RowConstraint& constraint) {
    if (!concerns_call(constraint)) return Status::ok();
    const int64_t rows = env_(constraint.rows);
    for (env_.row = 0; env_.row < rows; ++env_.row) {
      if (is_met(constraint)) continue;
      return invalid_argument(at(constraint.blame_slot) + " at b = " + std::to_string(env_.row) + ": " +
                              complaint(constraint));
    }
    return Status::ok();
  }

  // `Rule` is Constraint or RowConstraint.
  template <class Rule>
  bool concerns_call(const Rule& rule) const {
    if constexpr (std::is_same_v<Rule, RowConstraint>) {
      if (!is_bound(rule.rows.node())) return false;
    }
    return call_.has(rule.blame_slot) && is_bound(rule.lhs.node()) && is_bound(rule.rhs.node());
  }
  template <class Rule>
  bool is_met(const Rule& rule) {
    const int64_t lhs = env_(rule.lhs);
    const int64_t rhs = env_(rule.rhs);
    switch (rule.relation) {
      case Relation::kEqual:
        return lhs == rhs;
      case Relation::kAtMost:
        return lhs <= rhs;
      case Relation::kMultipleOf:
        return rhs > 0 ? lhs % rhs == 0 : lhs == 0;
    }
    return false;
  }
  template <class Rule>
  std::string complaint(const Rule& rule) {
    const std::string_view verb = rule.relation == Relation::kEqual    ? " differs from "
                                  : rule.relation == Relation::kAtMost ? " is more than "
                                                                       : " is no multiple of ";
    return sided(rule.lhs) + std::string(verb) + sided(rule.rhs);
  }
  /// "W * R = 32"; a plain number stands alone.
  std::string sided(const DimExpr& expr) {
    return expr.is_constant() ? expr.to_string() : expr.to_string() + " = " + std::to_string(env_(expr));
  }
  /// False when a symbol occurs that no given operand binds, or values that the graph does not have.
  bool is_bound(const DimExpr::Node& node) const {
    if (node.op == DimOp::kSymbol && call_.symbols[node.slot] == BoundCall::kUnbound) return false;
    if (node.op == DimOp::kElement && call_.has(node.slot) && call_.tensor(node.slot).data == nullptr) {
      return !is_graph_ && call_.tensor(node.slot).num_elements() == 0;
    }
    return (!node.lhs || is_bound(*node.lhs)) && (!node.rhs || is_bound(*node.rhs));
  }

  // ------------------------------------------------------------------------------------------------------------------
  static bool is_empty(const TensorView& tensor) {
    return std::any_of(tensor.shape.begin(), tensor.shape.begin() + tensor.rank, [](int64_t e) { return e == 0; });
  }

  /// Whether the address ranges of two operands meet: cheap, and almost never true.
  bool ranges_meet(int a, int b) {
    return address_range(a).first < address_range(b).second && address_range(b).first < address_range(a).second;
  }
  const std::pair<uintptr_t, uintptr_t>& address_range(int index) {
    auto& range = ranges_[index];
    if (range.second == 0 && !is_empty(call_.tensor(index))) range = ::polyop::address_range(call_.tensor(index));
    return range;
  }

  Status check_memory(int index) {
    if (!call_.has(index)) return Status::ok();
    const OperandSchema& operand = schema_.operands()[index];
    const TensorView& tensor = call_.tensor(index);
    if (operand.shape_only || is_empty(tensor)) return Status::ok();
    if (tensor.data == nullptr) return invalid_argument(at(index) + " has no data");
    const auto misplaced = reinterpret_cast<uintptr_t>(tensor.data) % static_cast<uintptr_t>(dtype_bytes(tensor.dtype));
    if (misplaced != 0) {
      return invalid_argument(at(index) + " lies " + std::to_string(misplaced) + " bytes past a multiple of its " +
                              std::to_string(dtype_bytes(tensor.dtype)) + "-byte elements, wanted 0");
    }
    if (operand.stride_rule == StrideRule::kContiguous && !tensor.is_contiguous()) {
      return invalid_argument(at(index) + " is not contiguous");
    }
    for (int axis = 0; axis < tensor.rank; ++axis) {
      if (tensor.shape[axis] == 1) continue;
      const bool last = axis == tensor.rank - 1;
      if (tensor.strides[axis] < 0) {
        return invalid_argument(at(index, axis) + " has stride " + std::to_string(tensor.strides[axis]) +
                                ", wanted at least 0");
      }
      if (last && operand.stride_rule == StrideRule::kUnitLastAxis && tensor.strides[axis] != 1) {
        return invalid_argument(at(index, axis) + " has stride " + std::to_string(tensor.strides[axis]) + ", wanted 1");
      }
    }
    if (!operand.is_written()) return Status::ok();
    if (overlaps_itself(tensor)) {
      return invalid_argument(at(index) + " is written and overlaps itself: two indices share one element");
    }
    for (int other = 0; other < static_cast<int>(schema_.operands().size()); ++other) {
      if (other == index || !call_.has(other)) continue;
      const OperandSchema& other_schema = schema_.operands()[other];
      if (!check_outputs_ && other_schema.role == OperandRole::kOutput) continue;
      if (other_schema.shape_only || !ranges_meet(index, other) || !may_overlap(tensor, call_.tensor(other))) continue;
      const bool allowed = other == operand.alias_slot && same_view(tensor, call_.tensor(other));
      if (!allowed) {
        return invalid_argument(at(index) + " is written and shares memory with " + other_schema.name);
      }
    }
    return Status::ok();
  }

  Status check_values(int index) {
    if (!call_.has(index)) return Status::ok();
    const OperandSchema& operand = schema_.operands()[index];
    const TensorView& tensor = call_.tensor(index);
    if (is_graph_ && tensor.data == nullptr) return Status::ok();
    for (const ValueRule& rule : operand.values) {
      if (!holds(rule.condition)) continue;
      if (rule.used && !is_bound(rule.used->node())) continue;
      POLYOP_RETURN_IF_ERROR(tensor.dtype == DType::kI64 ? check_values<int64_t>(index, tensor, rule)
                                                         : check_values<int32_t>(index, tensor, rule));
    }
    return Status::ok();
  }

  template <class T>
  Status check_values(int index, const TensorView& tensor, const ValueRule& rule) {
    const auto* data = static_cast<const T*>(tensor.data);
    env_.row = 0;
    const bool bounds_vary = varies_by_row(rule.lowest.node()) || varies_by_row(rule.highest.node());
    const bool has_highest = is_bound(rule.highest.node());
    int64_t lowest = env_(rule.lowest);
    int64_t highest = has_highest ? env_(rule.highest) : std::numeric_limits<int64_t>::max();
    const int64_t rows = tensor.shape[0];
    const int64_t columns = tensor.rank == 2 ? tensor.shape[1] : 1;
    int64_t previous = 0;
    for (int64_t row = 0; row < rows; ++row) {
      env_.row = row;
      if (bounds_vary) {
        lowest = env_(rule.lowest);
        if (has_highest) highest = env_(rule.highest);
      }
      const int64_t used = rule.used ? std::min(env_(*rule.used), columns) : columns;
      for (int64_t column = rule.first ? std::max<int64_t>(env_(*rule.first), 0) : 0; column < used; ++column) {
        const int64_t value = data[row * tensor.strides[0] + (tensor.rank == 2 ? column * tensor.strides[1] : 0)];
        const std::string_view broken = rule.cumulative && row == 0 && value != 0 ? "the first offset must be 0"
                                        : rule.cumulative && value < previous     ? "offsets must not decrease"
                                        : value < lowest || value > highest       ? "outside the range"
                                                                                  : "";
        if (!broken.empty()) {
          std::string where = at(index) + "[" + std::to_string(row);
          if (tensor.rank == 2) where += ", " + std::to_string(column);
          return invalid_argument(where + "] is " + std::to_string(value) + ", wanted " + std::to_string(lowest) +
                                  " to " + std::to_string(highest) + " (" + std::string(broken) + ")");
        }
        previous = value;
      }
    }
    return Status::ok();
  }

  static bool varies_by_row(const DimExpr::Node& node) {
    return node.op == DimOp::kElement || (node.lhs && varies_by_row(*node.lhs)) ||
           (node.rhs && varies_by_row(*node.rhs));
  }

  const OpSchema& schema_;
  BoundCall& call_;
  bool check_outputs_;
  bool is_graph_;
  NumberEnv env_;
  bool have_device_ = false;
  int device_from_ = 0;
  bool have_pack_ = false;
  const bool has_packs_ = !schema_.packs().empty();
  std::array<std::pair<int, int>, kMaxSymbols> origins_;
  std::array<std::pair<uintptr_t, uintptr_t>, kMaxOperands> ranges_{};  // first byte, one past the last
};

}  // namespace

Status bind_call(const OpSchema& schema, Operands operands, std::span<const AttributeValue> attributes,
                 BoundCall* call) {
  return Binder(schema, operands, call, BindMode::kCall).run(attributes);
}

Status infer_outputs(const OpSchema& schema, Operands operands, std::span<const AttributeValue> attributes,
                     std::span<OutputShape> outputs) {
  BoundCall call;
  Binder binder(schema, operands, &call, BindMode::kInputs);
  POLYOP_RETURN_IF_ERROR(binder.run(attributes));
  size_t next = 0;
  for (size_t i = 0; i < schema.operands().size() && next < outputs.size(); ++i) {
    if (schema.operands()[i].role != OperandRole::kOutput) continue;
    const OutputShape& output = outputs[next++] = binder.output_shape(static_cast<int>(i));
    for (int axis = 0; axis < output.rank; ++axis) {
      if (output.extents[axis] >= 0) continue;
      return invalid_argument(schema.name() + ": " + schema.operands()[i].name + " axis " + std::to_string(axis) +
                              " would be " + std::to_string(output.extents[axis]) + ", wanted at least 0");
    }
  }
  return Status::ok();
}

Status bind_graph_call(const OpSchema& schema, Operands operands, std::span<const AttributeValue> attributes,
                       GraphCall* result) {
  Binder binder(schema, operands, &result->call, BindMode::kGraph);
  POLYOP_RETURN_IF_ERROR(binder.run(attributes));
  binder.complete(result);
  return Status::ok();
}

}  // namespace polyop
