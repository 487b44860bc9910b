// One random case of int4_groupwise_gemm: operands with sentinels around what a kernel may touch, a runner, and the
// error bound of the operator's README.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "hwy/aligned_allocator.h"
#include "polyop/core/numeric_types.h"
#include "polyop/ops/int4_groupwise_gemm/int4_groupwise_gemm_problem.h"
#include "polyop/ops/int4_groupwise_gemm/packing.h"
#include "tests/cpp/testing/simd_targets.h"

namespace polyop::testing {

struct GemmExtents {
  int64_t n;
  int64_t k;
  int64_t group_size;
};

// Rows of x repeat with this period, so rows of out must, bit for bit, and the reference needs no more rows.
inline constexpr int64_t kDistinctRows = 7;
inline constexpr int64_t kRowGap = 5;  // sentinel elements behind each row of x, scales and out

// Largest relative rounding error of one operation in T.
template <class T>
constexpr double unit_roundoff() {
  return std::is_same_v<T, float> ? 0x1p-24 : std::is_same_v<T, F16> ? 0x1p-11 : 0x1p-8;
}

template <class T, class S = F16>
class GemmCase {
 public:
  explicit GemmCase(GemmExtents extents, uint32_t seed = 1) : extents_(extents) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    std::uniform_real_distribution<float> positive(0.005f, 0.02f);
    const auto [n, k, group_size] = extents;
    q_.resize(n * k);
    for (uint8_t& value : q_) value = random() & 15;
    packed_.resize(int4_fragment_rows(n, k) * kFragmentRowBytes);
    EXPECT_TRUE(pack_int4_fragments(q_.data(), n, k, packed_.data()).is_ok());
    const T x_sentinel = from_float<T>(std::numeric_limits<float>::quiet_NaN());
    const S scale_sentinel = from_float<S>(std::numeric_limits<float>::quiet_NaN());
    x_.assign(kDistinctRows * (k + kRowGap), x_sentinel);
    for (int64_t row = 0; row < kDistinctRows; ++row) {
      for (int64_t i = 0; i < k; ++i) x_[row * (k + kRowGap) + i] = from_float<T>(normal(random));
    }
    groups_ = (k + group_size - 1) / group_size;
    scales_.assign(groups_ * (n + kRowGap), scale_sentinel);
    for (int64_t group = 0; group < groups_; ++group) {
      for (int64_t i = 0; i < n; ++i) scales_[group * (n + kRowGap) + i] = from_float<S>(positive(random));
    }
  }

  // out [m, N + kRowGap] of the SIMD kernel; the gaps and one row on either side hold `sentinel` before and after.
  std::vector<T> run(int64_t m) const {
    const auto [n, k, group_size] = extents_;
    std::vector<T> x;
    for (int64_t row = 0; row < m; ++row) {
      const T* from = x_.data() + row % kDistinctRows * (k + kRowGap);
      x.insert(x.end(), from, from + k + kRowGap);
    }
    std::vector<T> out((m + 2) * (n + kRowGap), sentinel());
    const Int4GroupwiseGemmProblem problem{.m = m,
                                           .n = n,
                                           .k = k,
                                           .group_size = group_size,
                                           .x = x.data(),
                                           .x_dtype = kDTypeOf<T>,
                                           .x_rows = RowAxes::of(m, k + kRowGap),
                                           .qweight = packed_.data(),
                                           .scales = scales_.data(),
                                           .scales_dtype = kDTypeOf<S>,
                                           .scales_row_stride = n + kRowGap,
                                           .out = out.data() + n + kRowGap,
                                           .out_rows = RowAxes::of(m, n + kRowGap)};
    EXPECT_EQ(cpu::supports_int4_groupwise_gemm_simd(problem).message(), "");
    const int64_t bytes = cpu::int4_groupwise_gemm_simd_workspace_bytes(problem);
    const auto memory = hwy::AllocateAligned<uint8_t>(bytes + 1);
    std::memset(memory.get(), 0xff, bytes + 1);  // NaN: scratch that is read before it is written shows
    EXPECT_EQ(cpu::int4_groupwise_gemm_simd(problem, {memory.get(), bytes}, {}).message(), "");
    for (int64_t i = 0; i < static_cast<int64_t>(out.size()); ++i) {
      const int64_t row = i / (n + kRowGap);
      const bool inside = row > 0 && row <= m && i % (n + kRowGap) < n;
      if (inside) continue;
      EXPECT_EQ(std::memcmp(&out[i], &kSentinel, sizeof(T)), 0) << "sentinel " << i << " overwritten";
    }
    return {out.begin() + n + kRowGap, out.end() - n - kRowGap};
  }

  // Compares `out` [m, N + kRowGap] with double sums of the distinct rows, and the other rows with those, bit for bit.
  void check(const std::vector<T>& out, int64_t m) {
    const auto [n, k, group_size] = extents_;
    if (expected_.empty()) compute_expected();
    for (int64_t row = 0; row < m; ++row) {
      const T* got = out.data() + row * (n + kRowGap);
      if (row >= kDistinctRows) {
        ASSERT_EQ(std::memcmp(got, out.data() + row % kDistinctRows * (n + kRowGap), n * sizeof(T)), 0)
            << "row " << row << " differs from row " << row % kDistinctRows << " of the same x";
        continue;
      }
      for (int64_t column = 0; column < n; ++column) {
        const double expected = expected_[row * n + column];
        const double bound = error_bound(expected, magnitude_[row * n + column]);
        ASSERT_LE(std::abs(to_float(got[column]) - expected), bound)
            << "out[" << row << ", " << column << "] is " << to_float(got[column]) << ", wanted " << expected;
      }
    }
  }

  [[nodiscard]] const GemmExtents& extents() const { return extents_; }
  [[nodiscard]] int64_t row_stride() const { return extents_.n + kRowGap; }

 private:
  static constexpr uint32_t kSentinel = 0x5a5a5a5a;
  static T sentinel() {
    T value;
    std::memcpy(static_cast<void*>(&value), &kSentinel, sizeof(T));
    return value;
  }

  // README.md: gamma(2 (Kg / 4 + groups) + 2) of the sum of magnitudes (2: targets without FMA round twice), then one
  // rounding to T, whose subnormals are 2^-24 apart for f16.
  [[nodiscard]] double error_bound(double expected, double magnitude) const {
    const double roundings =
        2.0 * (static_cast<double>((extents_.group_size + 3) / 4) + static_cast<double>(groups_)) + 2.0;
    const double accumulation = roundings * 0x1p-24 / (1.0 - roundings * 0x1p-24) * magnitude;
    return accumulation + unit_roundoff<T>() * (std::abs(expected) + accumulation) + 0x1p-25;
  }

  void compute_expected() {
    const auto [n, k, group_size] = extents_;
    for (int64_t row = 0; row < kDistinctRows; ++row) {
      for (int64_t column = 0; column < n; ++column) {
        double sum = 0.0;
        double magnitude = 0.0;
        for (int64_t i = 0; i < k; ++i) {
          const double x = to_float(x_[row * (k + kRowGap) + i]);
          const double term = x * (q_[column * k + i] - 8) * to_float(scales_[i / group_size * (n + kRowGap) + column]);
          sum += term;
          magnitude += std::abs(term);
        }
        expected_.push_back(sum);
        magnitude_.push_back(magnitude);
      }
    }
  }

  GemmExtents extents_;
  int64_t groups_;
  std::vector<uint8_t> q_;
  std::vector<uint8_t> packed_;
  std::vector<T> x_;
  std::vector<S> scales_;
  std::vector<double> expected_;
  std::vector<double> magnitude_;
};

// on_every_simd_target without those that the kernel is not compiled for.
template <class Check>
void on_every_vector_target(Check check) {
  int targets = 0;
  on_every_simd_target([&] {
    Int4GroupwiseGemmProblem problem;
    problem.group_size = 32;
    if (!cpu::supports_int4_groupwise_gemm_simd(problem).is_ok()) return;
    ++targets;
    check();
  });
  EXPECT_GT(targets, 0);
}

}  // namespace polyop::testing
