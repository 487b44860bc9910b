// Calls one operator from plain C++: pads a 2 x 3 matrix by repeating it, then makes a mistake on purpose.
#include <array>
#include <cstdio>

#include "polyop/core/call.h"
#include "polyop/ops/operators.h"

int main() {
  std::array<float, 6> x = {1, 2, 3, 4, 5, 6};  // [2, 3]
  std::array<float, 20> out{};                  // [4, 5]
  const std::array<int64_t, 4> padding = {1, 1, 1, 1};

  // A view borrows memory; whoever calls keeps it alive.
  const auto x_view = polyop::TensorView::contiguous(x.data(), polyop::DType::kF32, {2, 3});
  const auto out_view = polyop::TensorView::contiguous(out.data(), polyop::DType::kF32, {4, 5});

  const polyop::Operator* circular_pad = polyop::operators().find("circular_pad");
  if (circular_pad == nullptr) return 1;
  const polyop::Status status = polyop::call_operator(*circular_pad, {{"x", x_view}, {"out", out_view}},
                                                      {{"padding", polyop::AttributeValue::of_ints(padding)}});
  if (!status.is_ok()) {
    std::fprintf(stderr, "%s\n", status.message().c_str());
    return 1;
  }
  for (size_t i = 0; i < out.size(); ++i) std::printf("%g%c", out[i], i % 5 == 4 ? '\n' : ' ');

  // A wrong call writes nothing and says what is wrong: here out is one column short.
  const auto short_view = polyop::TensorView::contiguous(out.data(), polyop::DType::kF32, {4, 4});
  const polyop::Status refused = polyop::call_operator(*circular_pad, {{"x", x_view}, {"out", short_view}},
                                                       {{"padding", polyop::AttributeValue::of_ints(padding)}});
  std::printf("refused: %s\n", refused.message().c_str());
  return refused.is_ok() ? 1 : 0;
}
