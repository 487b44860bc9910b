// bind_graph_call: a node checked before it runs, with unknown extents, ranks and values; symbols that only shapes
// which broadcast have.
#include <gtest/gtest.h>

#include <array>
#include <string>
#include <vector>

#include "polyop/core/shape_binding.h"

namespace polyop {
namespace {

OpSchema make_schema() {
  return SchemaBuilder("gather_rows", "Rows of x, counted by offsets.")
      .operand(input("x").dims({symbol("T"), symbol("Hq"), symbol("D")}).dtypes({DType::kF32, DType::kF16}))
      .operand(input("table").dims({symbol("Hkv"), symbol("D")}).dtype_of("x"))
      .operand(input("offsets").dims({symbol("B") + 1}).dtypes({DType::kI32}).cumulative(symbol("T")))
      .operand(input("mask").broadcast_dims({symbol("B"), symbol("M")}).dtypes({DType::kBool}).optional())
      .operand(output("out").dims({symbol("B"), symbol("Hq"), symbol("D")}).dtype_of("x"))
      .constrain(symbol("Hq"), Relation::kMultipleOf, symbol("Hkv"), "table", 0)
      .constrain_rows(symbol("B"), element("offsets", 1) - element("offsets"), Relation::kAtMost, symbol("M"), "mask")
      .build();
}

TensorView shaped(std::vector<int64_t> shape, DType dtype = DType::kF32, void* data = nullptr) {
  return TensorView::contiguous(data, dtype, shape.data(), static_cast<int32_t>(shape.size()));
}

struct Node {
  OpSchema schema = make_schema();
  std::array<TensorView, 5> views;
  std::array<const TensorView*, 5> operands{};
  GraphCall graph;

  Node(TensorView x, TensorView table, TensorView offsets) : views{x, table, offsets} {
    for (int i = 0; i < 3; ++i) operands[i] = &views[i];
  }
  void set_mask(TensorView mask) {
    views[3] = mask;
    operands[3] = &views[3];
  }
  std::string bind() { return bind_graph_call(schema, operands, {}, &graph).message(); }
};

TEST(GraphCall, UnknownExtentsAndValuesAreNotChecked_KnownOnesAre) {
  Node open(shaped({kUnknownExtent, 4, kUnknownExtent}), shaped({2, 8}), shaped({kUnknownExtent}, DType::kI32));
  EXPECT_EQ(open.bind(), "");
  Node clash(shaped({kUnknownExtent, 4, 16}), shaped({2, 8}), shaped({3}, DType::kI32));
  EXPECT_EQ(clash.bind(), "gather_rows: table axis 1 (D) is 8, wanted 16 as in x axis 2");
  Node ratio(shaped({kUnknownExtent, 4, 8}), shaped({3, kUnknownExtent}), shaped({3}, DType::kI32));
  EXPECT_EQ(ratio.bind(), "gather_rows: table axis 0 is 3; Hq = 4 is no multiple of Hkv = 3");
}

TEST(GraphCall, ValuesThatTheGraphHasAreChecked) {
  int32_t offsets[] = {0, 5, 4};
  Node node(shaped({6, 4, 8}), shaped({2, 8}), shaped({3}, DType::kI32, offsets));
  EXPECT_EQ(node.bind(), "gather_rows: offsets[2] is 4, wanted 0 to 6 (offsets must not decrease)");
  int32_t rising[] = {0, 5, 9};
  Node unbounded(shaped({kUnknownExtent, 4, 8}), shaped({2, 8}), shaped({3}, DType::kI32, rising));
  EXPECT_EQ(unbounded.bind(), "");
}

TEST(GraphCall, AfterwardsEveryExtentHasANumberThatFits) {
  Node node(shaped({kUnknownExtent, kUnknownExtent, 8}), shaped({3, kUnknownExtent}),
            shaped({kUnknownExtent}, DType::kI32));
  node.views[2].rank = kUnknownRank;
  ASSERT_EQ(node.bind(), "");
  const BoundCall& call = node.graph.call;
  EXPECT_EQ(call.tensor(0).shape[1], 3) << "a multiple of Hkv";
  EXPECT_EQ(call.tensor(1).shape[1], 8) << "D as x has it";
  EXPECT_EQ(call.tensor(2).rank, 1);
  EXPECT_EQ(call.tensor(2).shape[0], 2) << "B + 1 with B = 1";
  EXPECT_EQ(call.tensor(4).rank, 3);
  EXPECT_EQ(call.tensor(4).shape[2], 8);
}

TEST(GraphCall, ASymbolThatOnlyBroadcastsHas_TakesItsAxis) {
  int32_t offsets[] = {0, 5, 6};
  Node node(shaped({6, 4, 8}), shaped({2, 8}), shaped({3}, DType::kI32, offsets));
  for (const int64_t columns : {1, 5, 9}) {
    node.set_mask(shaped({2, columns}, DType::kBool));
    EXPECT_EQ(node.bind(), "") << columns;
  }
  node.set_mask(shaped({4}, DType::kBool));
  EXPECT_EQ(node.bind(), "gather_rows: mask at b = 0: offsets[b + 1] - offsets[b] = 5 is more than M = 4");
}

}  // namespace
}  // namespace polyop
