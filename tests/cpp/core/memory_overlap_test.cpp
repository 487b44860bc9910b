// memory_overlap: against marking every byte, over random views; the views that must be told apart.
#include "polyop/core/memory_overlap.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace polyop {
namespace {

alignas(64) char memory[1024];

TensorView view_at(int64_t offset_bytes, std::vector<int64_t> shape, std::vector<int64_t> strides,
                   DType dtype = DType::kU8) {
  TensorView view{
      .data = memory + offset_bytes, .dtype = dtype, .device = {}, .rank = static_cast<int32_t>(shape.size())};
  for (size_t axis = 0; axis < shape.size(); ++axis) {
    view.shape[axis] = shape[axis];
    view.strides[axis] = strides[axis];
  }
  return view;
}

/// How often each byte of `memory` is addressed.
std::vector<int> touched(const TensorView& view) {
  std::vector<int> counts(sizeof(memory));
  for (int64_t i = 0; i < view.num_elements(); ++i) {
    int64_t rest = i;
    int64_t offset = 0;
    for (int axis = view.rank - 1; axis >= 0; --axis) {
      offset += rest % view.shape[axis] * view.strides[axis];
      rest /= view.shape[axis];
    }
    for (int64_t byte = 0; byte < dtype_bytes(view.dtype); ++byte) {
      ++counts[static_cast<size_t>(static_cast<char*>(view.data) - memory + offset * dtype_bytes(view.dtype) + byte)];
    }
  }
  return counts;
}

bool really_overlaps_itself(const TensorView& view) {
  for (const int count : touched(view)) {
    if (count > 1) return true;
  }
  return false;
}

bool really_overlap(const TensorView& a, const TensorView& b) {
  const std::vector<int> in_a = touched(a);
  const std::vector<int> in_b = touched(b);
  for (size_t i = 0; i < in_a.size(); ++i) {
    if (in_a[i] > 0 && in_b[i] > 0) return true;
  }
  return false;
}

TEST(MemoryOverlap, RandomViews_AreNeverCalledApartWhenTheyAreNot) {
  std::mt19937 random(1);
  const auto pick = [&](int64_t low, int64_t high) {
    return low + static_cast<int64_t>(random() % static_cast<uint64_t>(high - low + 1));
  };
  const auto random_view = [&] {
    const DType dtype = pick(0, 1) == 0 ? DType::kU8 : DType::kF16;
    return view_at(2 * pick(0, 100), {pick(0, 4), pick(1, 4), pick(1, 5)}, {pick(0, 30), pick(0, 9), pick(0, 2)},
                   dtype);
  };
  for (int round = 0; round < 20000; ++round) {
    const TensorView a = random_view();
    const TensorView b = random_view();
    if (really_overlaps_itself(a)) {
      ASSERT_TRUE(overlaps_itself(a)) << "round " << round;
    }
    if (really_overlap(a, b)) {
      ASSERT_TRUE(may_overlap(a, b) && may_overlap(b, a)) << "round " << round;
    }
  }
}

TEST(MemoryOverlap, SlicedAndPermutedViews_AreExact) {
  EXPECT_FALSE(overlaps_itself(view_at(0, {3, 4, 5}, {20, 5, 1})));
  EXPECT_FALSE(overlaps_itself(view_at(0, {5, 3, 4}, {1, 20, 5}))) << "permuted";
  EXPECT_FALSE(overlaps_itself(view_at(0, {3, 4}, {20, 2}))) << "every second column";
  EXPECT_TRUE(overlaps_itself(view_at(0, {3, 4}, {3, 1}))) << "rows share an element";
  EXPECT_TRUE(overlaps_itself(view_at(0, {3}, {0})));
  EXPECT_FALSE(overlaps_itself(view_at(0, {1, 4}, {0, 1}))) << "an axis of extent 1 has no stride";
  EXPECT_FALSE(overlaps_itself(view_at(0, {0, 3}, {0, 0}))) << "nothing is addressed";
  EXPECT_FALSE(overlaps_itself(view_at(0, {}, {})));
}

TEST(MemoryOverlap, ColumnsOfOneProjection_AreToldApart) {
  const TensorView q = view_at(0, {4, 2, 8}, {48, 8, 1}, DType::kF16);
  const TensorView k = view_at(2 * 16, {4, 1, 8}, {48, 8, 1}, DType::kF16);
  const TensorView too_wide = view_at(0, {4, 3, 8}, {48, 8, 1}, DType::kF16);
  EXPECT_FALSE(may_overlap(q, k));
  EXPECT_FALSE(may_overlap(k, q));
  EXPECT_TRUE(may_overlap(too_wide, k));
  const TensorView next_rows = view_at(2 * (48 * 2 + 16), {4, 1, 8}, {48, 8, 1}, DType::kF16);
  EXPECT_FALSE(may_overlap(q, next_rows)) << "the same columns two rows on";
}

TEST(MemoryOverlap, DisjointRangesAndEmptyViews) {
  EXPECT_FALSE(may_overlap(view_at(0, {10}, {1}), view_at(10, {10}, {1})));
  EXPECT_TRUE(may_overlap(view_at(0, {11}, {1}), view_at(10, {10}, {1})));
  EXPECT_FALSE(may_overlap(view_at(0, {0}, {1}), view_at(0, {10}, {1})));
  TensorView nowhere = view_at(0, {4}, {1});
  nowhere.data = nullptr;
  EXPECT_FALSE(may_overlap(nowhere, nowhere));
}

TEST(MemoryOverlap, SameView_LooksAtWhatIsAddressed) {
  const TensorView view = view_at(0, {3, 1, 4}, {4, 4, 1});
  EXPECT_TRUE(same_view(view, view));
  EXPECT_TRUE(same_view(view, view_at(0, {3, 1, 4}, {4, 77, 1}))) << "the stride of an extent of 1 does not count";
  EXPECT_FALSE(same_view(view, view_at(4, {3, 1, 4}, {4, 4, 1})));
  EXPECT_FALSE(same_view(view, view_at(0, {3, 1, 4}, {8, 4, 1})));
  EXPECT_FALSE(same_view(view, view_at(0, {2, 1, 4}, {4, 4, 1})));
  EXPECT_FALSE(same_view(view, view_at(0, {3, 4}, {4, 1})));
  EXPECT_FALSE(same_view(view, view_at(0, {3, 1, 4}, {4, 4, 1}, DType::kI8)));
}

TEST(TensorView, Contiguity) {
  EXPECT_TRUE(view_at(0, {3, 4}, {4, 1}).is_contiguous());
  EXPECT_TRUE(view_at(0, {3, 1, 4}, {4, 9, 1}).is_contiguous());
  EXPECT_TRUE(view_at(0, {0, 4}, {9, 9}).is_contiguous());
  EXPECT_TRUE(view_at(0, {}, {}).is_contiguous());
  EXPECT_FALSE(view_at(0, {3, 4}, {5, 1}).is_contiguous());
  const TensorView made = TensorView::contiguous(memory, DType::kF32, {2, 3, 4});
  EXPECT_EQ(made.strides[0], 12);
  EXPECT_EQ(made.strides[1], 4);
  EXPECT_EQ(made.strides[2], 1);
  EXPECT_EQ(made.num_elements(), 24);
}

}  // namespace
}  // namespace polyop
