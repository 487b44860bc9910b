// circular_pad: both kernels against an index formula of their own over ranks, dtypes, strides and paddings; refusals.
#include <gtest/gtest.h>

#include <cstring>
#include <limits>

#include "polyop/cpu/thread_pool.h"
#include "tests/cpp/testing/call_kernel.h"
#include "tests/cpp/testing/guarded_tensor.h"

namespace polyop {
namespace {

using testing::Call;
using testing::call_kernel;
using testing::GuardedTensor;

constexpr DType kDTypes[] = {DType::kF32, DType::kF16, DType::kBF16, DType::kF8E4M3, DType::kI64,
                             DType::kI32, DType::kI8,  DType::kU8,   DType::kBool};

std::string list_text(const std::vector<int64_t>& values) {
  std::string text = "[";
  for (const int64_t value : values) text += (text.size() > 1 ? ", " : "") + std::to_string(value);
  return text + "]";
}

std::vector<int64_t> padded_shape(std::vector<int64_t> shape, const std::vector<int64_t>& padding) {
  for (size_t pair = 0; pair < padding.size() / 2; ++pair) {
    shape[shape.size() - 1 - pair] += padding[2 * pair] + padding[2 * pair + 1];
  }
  return shape;
}

/// Checks `out` element by element: walks back by whole extents instead of taking remainders.
void expect_padded(GuardedTensor& x, GuardedTensor& out, const std::vector<int64_t>& padding) {
  const TensorView x_view = x.view();
  const TensorView out_view = out.view();
  for (int64_t i = 0; i < out.size(); ++i) {
    int64_t rest = i;
    int64_t x_index = 0;
    int64_t x_step = 1;
    for (int axis = out_view.rank - 1; axis >= 0; --axis) {
      const auto pair = static_cast<size_t>(out_view.rank - 1 - axis);
      int64_t index = rest % out_view.shape[axis] - (2 * pair < padding.size() ? padding[2 * pair] : 0);
      rest /= out_view.shape[axis];
      while (index < 0) index += x_view.shape[axis];
      while (index >= x_view.shape[axis]) index -= x_view.shape[axis];
      x_index += index * x_step;
      x_step *= x_view.shape[axis];
    }
    const auto bytes = static_cast<size_t>(dtype_bytes(x_view.dtype));
    ASSERT_EQ(std::memcmp(&x.at<uint8_t>(x_index), &out.at<uint8_t>(i), bytes), 0) << "element " << i;
  }
  EXPECT_TRUE(out.guards_intact());
}

void check(DType dtype, const std::vector<int64_t>& shape, const std::vector<int64_t>& padding,
           const std::vector<int64_t>& x_gaps = {}, const std::vector<int64_t>& out_gaps = {}) {
  std::mt19937 random(1);
  for (const std::string_view kernel : {"cpu_row_pieces", "reference"}) {
    SCOPED_TRACE(std::string(kernel) + " " + std::string(dtype_name(dtype)) + " " + list_text(shape) + " padding " +
                 list_text(padding));
    GuardedTensor x(dtype, shape, x_gaps);
    x.fill_bits(random);
    GuardedTensor out(dtype, padded_shape(shape, padding), out_gaps);
    const Status status = call_kernel(
        {"circular_pad", {{"x", x}, {"out", out}}, {{"padding", AttributeValue::of_ints(padding)}}}, kernel);
    ASSERT_TRUE(status.is_ok()) << status.message();
    expect_padded(x, out, padding);
  }
}

TEST(CircularPad, Kernels_MatchFormula_RanksZeroToEight) {
  check(DType::kF32, {}, {});
  check(DType::kF32, {3}, {2, 1});
  check(DType::kF32, {2, 3}, {1, 1, 1, 2});
  check(DType::kF32, {2, 3, 4}, {3, 0, 0, 1});
  check(DType::kF32, {2, 1, 3, 4}, {1, 2, 2, 1, 3, 3, 1, 0});
  check(DType::kF32, {2, 1, 2, 1, 3}, {1, 1, 1, 1});
  check(DType::kF32, {1, 2, 1, 2, 1, 3}, {0, 0, 2, 2, 0, 1});
  check(DType::kF32, {1, 2, 1, 2, 1, 2, 2}, {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1});
  check(DType::kF32, {1, 2, 1, 2, 1, 2, 1, 2}, {1, 0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 1});
}

TEST(CircularPad, Kernels_MatchFormula_EveryDtype) {
  for (const DType dtype : kDTypes) {
    check(dtype, {3, 5}, {4, 7, 1, 1});
    check(dtype, {3, 5}, {4, 7, 1, 1}, {1, 2}, {2, 3});
  }
}

TEST(CircularPad, Kernels_MatchFormula_PaddingBeyondTheExtent) {
  check(DType::kU8, {1}, {9, 9});
  check(DType::kU8, {3, 4}, {13, 30, 7, 11});
  check(DType::kI64, {2, 5}, {0, 26});
  check(DType::kI64, {2, 5}, {26, 0});
}

TEST(CircularPad, Kernels_MatchFormula_NegativePaddingCrops) {
  check(DType::kF16, {5, 7}, {-2, -1});
  check(DType::kF16, {5, 7}, {-2, 4, 3, -4});
  check(DType::kF16, {5, 7}, {9, -8});
  check(DType::kF16, {5, 7}, {-7, 7});
  check(DType::kF16, {5, 7}, {-9, 12});  // starts past the end: wraps
  check(DType::kF16, {5, 7}, {-3, -4});  // nothing is left
}

TEST(CircularPad, Kernels_MatchFormula_EmptyTensors) {
  check(DType::kF32, {0}, {});
  check(DType::kF32, {0, 4}, {1, 1});
  check(DType::kF32, {4, 0}, {0, 0, 1, 1});
  check(DType::kF32, {3, 0, 2}, {1, 0});
}

TEST(CircularPad, StridesOfEveryKind_MatchFormula) {
  // A transposed input: its last axis is not dense, so the fast kernel passes it on.
  std::mt19937 random(2);
  GuardedTensor x(DType::kF32, {3, 5});
  x.fill_bits(random);
  GuardedTensor transposed(DType::kF32, {5, 3});
  for (int64_t row = 0; row < 5; ++row) {
    for (int64_t column = 0; column < 3; ++column) {
      transposed.at<uint32_t>({row, column}) = x.at<uint32_t>({column, row});
    }
  }
  TensorView view = x.view();
  std::swap(view.shape[0], view.shape[1]);
  std::swap(view.strides[0], view.strides[1]);
  const std::vector<int64_t> padding = {2, 5, 1, 0};
  GuardedTensor out(DType::kF32, {6, 10});
  const Call call = {"circular_pad", {{"x", view}, {"out", out}}, {{"padding", AttributeValue::of_ints(padding)}}};
  ASSERT_TRUE(call_kernel(call).is_ok());
  expect_padded(transposed, out, padding);
  EXPECT_EQ(testing::call_kernel(call, "cpu_row_pieces").message(),
            "circular_pad: no kernel takes this call: cpu_row_pieces: the last axis of x or out is not dense");

  TensorView repeated = x.view();  // stride 0: every row is the first one
  repeated.strides[0] = 0;
  GuardedTensor rows(DType::kF32, {4, 5});
  ASSERT_TRUE(call_kernel({"circular_pad",
                           {{"x", repeated}, {"out", rows}},
                           {{"padding", AttributeValue::of_ints(std::vector<int64_t>{0, 0, 1, 0})}}})
                  .is_ok());
  for (int64_t i = 0; i < rows.size(); ++i) ASSERT_EQ(rows.at<uint32_t>(i), x.at<uint32_t>(i % 5));
}

TEST(CircularPad_Cpu, RowPieces_SameBits_OneToThreeThreads) {
  const int threads_before = cpu::ThreadPool::shared().num_threads();
  for (const int threads : {1, 2, 3}) {
    cpu::ThreadPool::shared().set_num_threads(threads);
    check(DType::kF32, {40, 700}, {800, 100, 17, 30});
  }
  cpu::ThreadPool::shared().set_num_threads(threads_before);
}

TEST(CircularPad, Refusals_HaveExactTexts_AndWriteNothing) {
  GuardedTensor x(DType::kF32, {3, 4});
  GuardedTensor out(DType::kF32, {3, 6});
  const auto refuse = [&](TensorView from, TensorView to, const std::vector<int64_t>& padding) {
    const std::vector<uint8_t> before = out.memory();
    const std::string text =
        testing::refusal({"circular_pad", {{"x", from}, {"out", to}}, {{"padding", AttributeValue::of_ints(padding)}}});
    EXPECT_EQ(out.memory(), before);
    return text;
  };
  EXPECT_EQ(refuse(x, out, {1, 2}),
            "circular_pad: out axis 1 (X[axis] + padding[(rank(X) - 1 - axis) * 2] + padding[(rank(X) - 1 - axis) * 2 "
            "+ 1]) is 6, wanted 7");
  EXPECT_EQ(refuse(x, out, {1, 1, 0}),
            "circular_pad: attribute padding has 3 entries, wanted an even number of at most 4 for x of rank 2");
  EXPECT_EQ(refuse(x, out, {1, 1, 0, 0, 5, 5}),
            "circular_pad: attribute padding has 6 entries, wanted an even number of at most 4 for x of rank 2");
  // An extent that would wrap around to the right number.
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  EXPECT_EQ(refuse(x, GuardedTensor(DType::kF32, {3, 2}), {kMost, kMost}),
            "circular_pad: attribute padding[0] is 9223372036854775807, wanted -2^61 to 2^61");
  GuardedTensor empty(DType::kF32, {3, 0});
  EXPECT_EQ(refuse(empty, out, {3, 3}),
            "circular_pad: x axis 1 is 0, wanted at least 1: out has 6 there and nothing to repeat");
  EXPECT_EQ(refuse(x, GuardedTensor(DType::kF16, {3, 6}), {1, 1}), "circular_pad: out is f16, wanted f32 as x");
  EXPECT_EQ(refuse(x, GuardedTensor(DType::kF32, {18}), {1, 1}), "circular_pad: out has rank 1, wanted 2");
  TensorView backwards = x.view();
  backwards.strides[0] = -4;
  EXPECT_EQ(refuse(backwards, out, {1, 1}), "circular_pad: x axis 0 has stride -4, wanted at least 0");
  TensorView folded = out.view();
  folded.strides[0] = 0;
  EXPECT_EQ(refuse(x, folded, {1, 1}),
            "circular_pad: out is written and overlaps itself: two indices share one element");
  EXPECT_EQ(refuse(x, x, {0, 0}), "circular_pad: out is written and shares memory with x");
  TensorView nowhere = x.view();
  nowhere.data = nullptr;
  EXPECT_EQ(refuse(nowhere, out, {1, 1}), "circular_pad: x has no data");
  EXPECT_EQ(testing::refusal({"circular_pad", {{"x", x}, {"out", out}}, {}}),
            "circular_pad: attribute padding is missing");
  GuardedTensor nibbles(DType::kI4, {3, 4});
  EXPECT_EQ(refuse(nibbles, out, {1, 1}),
            "circular_pad: x is i4, wanted f32, f16, bf16, f8e4m3, i64, i32, i8, u8 or bool");
}

}  // namespace
}  // namespace polyop
