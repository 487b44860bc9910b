// One random case of int4_groupwise_gemm: operands with sentinels around what a kernel may touch, a runner, and the
// error bounds of the operator's README.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
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

// What the bounds of a README depend on, for one element of out.
struct GemmMagnitudes {
  double exact = 0.0;
  double terms = 0.0;   // sum over k of |x w s|
  double coarse = 0.0;  // sum over groups of max |x| and the sum over its k of |w s|
};

// A kernel and its error before the result is rounded to T.
template <class T>
struct GemmKernel {
  Status (*supports)(const Int4GroupwiseGemmProblem&);
  int64_t (*workspace_bytes)(const Int4GroupwiseGemmProblem&);
  Status (*launch)(const Int4GroupwiseGemmProblem&, Workspace, Stream);
  double (*error)(const GemmExtents&, const GemmMagnitudes&);
};

constexpr double gamma_of(double roundings) { return roundings * 0x1p-24 / (1.0 - roundings * 0x1p-24); }

constexpr double groups_of(const GemmExtents& extents) {
  return static_cast<double>((extents.k + extents.group_size - 1) / extents.group_size);
}

// gamma(2 (Kg / 4 + groups) + 2): 2, because targets without FMA round twice.
template <class T>
inline constexpr GemmKernel<T> kSimdKernel = {
    .supports = cpu::supports_int4_groupwise_gemm_simd,
    .workspace_bytes = cpu::int4_groupwise_gemm_simd_workspace_bytes,
    .launch = cpu::int4_groupwise_gemm_simd,
    .error = [](const GemmExtents& extents, const GemmMagnitudes& of) {
      return gamma_of(2.0 * (static_cast<double>((extents.group_size + 3) / 4) + groups_of(extents)) + 2.0) * of.terms;
    }};

// c = 2^-b coarse is what x loses as an integer of b bits; then c + gamma(groups + 3) (terms + c).
template <class T>
inline constexpr GemmKernel<T> kAmxKernel = {.supports = cpu::supports_int4_groupwise_gemm_amx,
                                             .workspace_bytes = cpu::int4_groupwise_gemm_amx_workspace_bytes,
                                             .launch = cpu::int4_groupwise_gemm_amx,
                                             .error = [](const GemmExtents& extents, const GemmMagnitudes& of) {
                                               const double cut =
                                                   of.coarse * (std::is_same_v<T, float> ? 0x1p-26 : 0x1p-20);
                                               return cut + gamma_of(groups_of(extents) + 3.0) * (of.terms + cut);
                                             }};

template <class T, class S = F16>
class GemmCase {
 public:
  explicit GemmCase(GemmExtents extents, uint32_t seed = 1, const GemmKernel<T>& kernel = kSimdKernel<T>)
      : extents_(extents), kernel_(kernel) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    std::uniform_real_distribution<float> positive(0.005f, 0.02f);
    const auto [n, k, group_size] = extents;
    q_.resize(n * k);
    for (uint8_t& value : q_) value = random() & 15;
    packed_.resize(int4_fragment_rows(n, k) * kFragmentRowBytes);
    pack();
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

  // Row `row` of x, below kDistinctRows; to be changed before the first check().
  T* x_row(int64_t row) { return x_.data() + row * (extents_.k + kRowGap); }
  // Weights q [N, K], as given to pack().
  std::vector<uint8_t>& q() { return q_; }
  void pack() { EXPECT_TRUE(pack_int4_fragments(q_.data(), extents_.n, extents_.k, packed_.data()).is_ok()); }

  // out [m, N + kRowGap] of the kernel; the gaps and one row on either side hold `sentinel` before and after.
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
    EXPECT_EQ(kernel_.supports(problem).message(), "");
    const int64_t bytes = kernel_.workspace_bytes(problem);
    const auto memory = hwy::AllocateAligned<uint8_t>(bytes + 1);
    std::memset(memory.get(), 0xff, bytes + 1);  // NaN: scratch that is read before it is written shows
    EXPECT_EQ(kernel_.launch(problem, {memory.get(), bytes}, {}).message(), "");
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
        const GemmMagnitudes& of = expected_[row * n + column];
        const double expected = of.exact;
        const double bound = error_bound(of);
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

  // The kernel's error, then one rounding to T, whose subnormals are 2^-24 apart for f16.
  [[nodiscard]] double error_bound(const GemmMagnitudes& of) const {
    const double arithmetic = kernel_.error(extents_, of);
    return arithmetic + unit_roundoff<T>() * (std::abs(of.exact) + arithmetic) + 0x1p-25;
  }

  void compute_expected() {
    const auto [n, k, group_size] = extents_;
    for (int64_t row = 0; row < kDistinctRows; ++row) {
      for (int64_t column = 0; column < n; ++column) {
        GemmMagnitudes of;
        double largest = 0.0;
        double group_weights = 0.0;
        for (int64_t i = 0; i < k; ++i) {
          const double x = to_float(x_[row * (k + kRowGap) + i]);
          const double weight = (q_[column * k + i] - 8) * to_float(scales_[i / group_size * (n + kRowGap) + column]);
          of.exact += x * weight;
          of.terms += std::abs(x * weight);
          largest = std::max(largest, std::abs(x));
          group_weights += std::abs(weight);
          if ((i + 1) % group_size == 0 || i + 1 == k) {
            of.coarse += largest * group_weights;
            largest = group_weights = 0.0;
          }
        }
        expected_.push_back(of);
      }
    }
  }

  GemmExtents extents_;
  GemmKernel<T> kernel_;
  int64_t groups_;
  std::vector<uint8_t> q_;
  std::vector<uint8_t> packed_;
  std::vector<T> x_;
  std::vector<S> scales_;
  std::vector<GemmMagnitudes> expected_;
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
