// Shape binding: checks the operands and attributes of one call against the schema and binds its symbols to numbers.
// Every error text of a wrong call is made here: operator, operand, axis, got, wanted.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "polyop/core/op_schema.h"
#include "polyop/core/status.h"
#include "polyop/core/tensor_view.h"

namespace polyop {

/// One call whose operands fit the schema. Borrows the tensors and attribute values; valid while they live.
struct BoundCall {
  const OpSchema* schema = nullptr;
  std::span<const TensorView* const> operands;            // in schema order; null where absent
  std::array<AttributeValue, kMaxAttributes> attributes;  // in schema order, defaults filled in
  std::array<int64_t, kMaxSymbols> symbols{};             // extents by symbol index; kUnbound where no operand binds it
  int32_t pack_rank = 0;                                  // number of axes in the schema's pack
  std::array<int64_t, kMaxRank> pack_extents{};
  Device device;

  static constexpr int64_t kUnbound = -1;

  [[nodiscard]] bool has(int operand) const { return operands[operand] != nullptr; }
  [[nodiscard]] const TensorView& tensor(int operand) const { return *operands[operand]; }
  /// Extent of a symbol by name; for use outside hot paths and in problem construction (a handful of short names).
  [[nodiscard]] int64_t extent(std::string_view symbol_name) const {
    return symbols[schema->symbol_index(symbol_name)];
  }
  [[nodiscard]] const AttributeValue& attribute(std::string_view name) const {
    return attributes[schema->attribute_index(name)];
  }
};

/// Extents of one output.
struct OutputShape {
  bool present = false;
  DType dtype = DType::kF32;
  int32_t rank = 0;
  std::array<int64_t, kMaxRank> extents{};
};

/// Fills `call` from operands and attributes in schema order, or says what is wrong. Nothing is written to any tensor.
/// All operands must lie on one device; integer operands on the CPU have their values checked against the schema's
/// ranges.
///   operands    one pointer an operand, null for absent ones
///   attributes  one value an attribute, `present` false for absent ones
Status bind_call(const OpSchema& schema, std::span<const TensorView* const> operands,
                 std::span<const AttributeValue> attributes, BoundCall* call);

/// Extents and dtypes of the outputs that a call with these inputs has, for a host that allocates them: as bind_call,
/// but output entries of `operands` are ignored. `outputs` has one entry an output of the schema, in order.
Status infer_outputs(const OpSchema& schema, std::span<const TensorView* const> operands,
                     std::span<const AttributeValue> attributes, std::span<OutputShape> outputs);

/// Extent and rank of a tensor in a graph that are not known before it runs.
inline constexpr int64_t kUnknownExtent = -1;
inline constexpr int32_t kUnknownRank = -1;

/// A call that is looked at before it runs: a node of a graph. `call` reads the views here, so it stays where it is.
struct GraphCall {
  BoundCall call;
  std::array<TensorView, kMaxOperands> views;  // contiguous, outputs included; data only where the graph has it
  std::array<const TensorView*, kMaxOperands> operands{};

  GraphCall() = default;
  GraphCall(const GraphCall&) = delete;
  GraphCall& operator=(const GraphCall&) = delete;
};

/// Checks what a graph tells about a call: extents may be kUnknownExtent, a rank kUnknownRank, data null. Values of
/// operands with (host-visible) data are checked, memory is not. Afterwards every unknown extent has a value that fits
/// the known ones, 1 where nothing ties it, so that Operator::explain can ask the kernels. Output entries of `operands`
/// are ignored.
Status bind_graph_call(const OpSchema& schema, std::span<const TensorView* const> operands,
                       std::span<const AttributeValue> attributes, GraphCall* result);

}  // namespace polyop
