// FixedDivisor against `/`: all small pairs, and numbers of every size up to the largest.
#include "polyop/cuda/division.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <random>

namespace polyop::cuda {
namespace {

constexpr int32_t kMost = std::numeric_limits<int32_t>::max();

TEST(FixedDivisor, SmallPairs) {
  for (int32_t d = 1; d < 600; ++d) {
    const FixedDivisor divisor(d);
    for (int32_t n = 0; n < 2000; ++n) ASSERT_EQ(divisor.quotient(n), n / d) << n << " / " << d;
    ASSERT_EQ(divisor.quotient(kMost), kMost / d) << d;
  }
}

TEST(FixedDivisor, NumbersOfEverySize) {
  std::mt19937 random(1);
  for (int i = 0; i < 1000000; ++i) {
    const auto d = static_cast<int32_t>(random() >> 1 >> random() % 31 | 1);
    const auto n = static_cast<int32_t>(random() >> 1 >> random() % 31);
    ASSERT_EQ(FixedDivisor(d).quotient(n), n / d) << n << " / " << d;
  }
  EXPECT_EQ(FixedDivisor(kMost).quotient(kMost - 1), 0);
  EXPECT_EQ(FixedDivisor(kMost).quotient(kMost), 1);
}

TEST(FixedDivisor, RoundsUp) {
  for (int32_t d = 1; d < 100; ++d) {
    for (int32_t n = 0; n < 500; ++n) ASSERT_EQ(FixedDivisor(d).quotient_up(n, d), (n + d - 1) / d) << n << " / " << d;
  }
}

}  // namespace
}  // namespace polyop::cuda
