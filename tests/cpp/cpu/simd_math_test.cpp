// simd_math: exp2 on every target that this processor runs.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "tests/cpp/cpu/simd_math_test.cpp"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
//
#include "hwy/highway.h"
#include "polyop/cpu/simd_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace polyop::cpu::HWY_NAMESPACE {

// `count` is a multiple of every vector length.
void exp2_all(const float* from, float* to, size_t count) {
  const hn::ScalableTag<float> d;
  for (size_t i = 0; i < count; i += hn::Lanes(d)) hn::StoreU(exp2(d, hn::LoadU(d, from + i)), d, to + i);
}

}  // namespace polyop::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "tests/cpp/testing/simd_targets.h"

namespace polyop::cpu {
HWY_EXPORT(exp2_all);

namespace {

constexpr size_t kMostLanes = 64;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

std::vector<float> exp2_of(std::vector<float> x) {
  const size_t count = x.size();
  x.resize((count + kMostLanes - 1) / kMostLanes * kMostLanes, 0.0f);
  std::vector<float> y(x.size());
  HWY_DYNAMIC_DISPATCH(exp2_all)(x.data(), y.data(), x.size());
  y.resize(count);
  return y;
}

TEST(SimdMath, Exp2_WithinTwoUlp_EveryTarget) {
  std::vector<float> x;
  constexpr uint32_t kStep = 1009;  // prime: all mantissas and exponents are visited
  for (uint32_t bits = 0; bits < std::bit_cast<uint32_t>(127.0f); bits += kStep) {
    x.push_back(std::bit_cast<float>(bits));
    if (x.back() <= 126.0f) x.push_back(-x.back());
  }
  testing::on_every_simd_target([&] {
    const std::vector<float> y = exp2_of(x);
    double worst = 0.0;
    float worst_x = 0.0f;
    for (size_t i = 0; i < x.size(); ++i) {
      const double exact = std::exp2(static_cast<double>(x[i]));
      const double ulp = std::ldexp(1.0, std::ilogb(exact) - 23);
      const double error = std::abs(static_cast<double>(y[i]) - exact) / ulp;
      if (!(error <= worst)) worst = error, worst_x = x[i];
    }
    EXPECT_LE(worst, 2.0) << "at " << worst_x;
  });
}

TEST(SimdMath, Exp2_Edges_EveryTarget) {
  testing::on_every_simd_target([] {
    const std::vector<float> y =
        exp2_of({0.0f, -0.0f, 1.0f, -126.0f, -126.5f, -1e30f, -kInfinity, std::numeric_limits<float>::quiet_NaN()});
    EXPECT_EQ(y[0], 1.0f);
    EXPECT_EQ(y[1], 1.0f);
    EXPECT_EQ(y[2], 2.0f);
    EXPECT_EQ(y[3], 0x1p-126f);
    EXPECT_EQ(y[4], 0.0f);
    EXPECT_EQ(y[5], 0.0f);
    EXPECT_EQ(y[6], 0.0f);
    EXPECT_TRUE(std::isnan(y[7]));
  });
}

}  // namespace
}  // namespace polyop::cpu
#endif  // HWY_ONCE
