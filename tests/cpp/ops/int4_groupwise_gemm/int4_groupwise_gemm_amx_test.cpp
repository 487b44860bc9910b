// The AMX kernel against double sums; equal bits on its paths for few and for many rows; numbers that it leaves to the
// SIMD kernel.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "gemm_case.h"
#include "polyop/cpu/amx.h"
#include "polyop/cpu/thread_pool.h"

namespace polyop {
namespace {

using testing::GemmCase;
using testing::GemmExtents;
using testing::kAmxKernel;
using testing::kDistinctRows;

// Rows of `rows` in `many`, bit for bit; both [*, stride].
template <class T>
void expect_equal_rows(const std::vector<T>& few, const std::vector<T>& many, int64_t n, int64_t stride, int64_t rows) {
  for (int64_t row = 0; row < rows; ++row) {
    ASSERT_EQ(std::memcmp(&few[row * stride], &many[row * stride], n * sizeof(T)), 0)
        << "row " << row << " of " << rows;
  }
}

class Int4GroupwiseGemm_Amx : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!cpu::has_amx_int8() || !cpu::has_amx_bf16()) GTEST_SKIP() << "this machine has no AMX, or POLYOP_AMX=0 is set";
  }
};

template <class T, class S = F16>
void check_against_double(const GemmExtents& extents) {
  SCOPED_TRACE(::testing::Message() << "N " << extents.n << ", K " << extents.k << ", Kg " << extents.group_size);
  GemmCase<T, S> gemm_case(extents, 1, kAmxKernel<T>);
  for (const int64_t m : {0, 1, 2, 3, 7, 16, 21, 200}) {
    SCOPED_TRACE(::testing::Message() << "M " << m);
    gemm_case.check(gemm_case.run(m), m);
  }
}

template <class T>
void check_shapes() {
  for (const int64_t n : {1, 33, 130, 576}) {
    for (const int64_t k : {32, 96, 576, 1000}) {
      for (const int64_t group_size : {32, 64, 128}) {
        check_against_double<T>({n, k, group_size});
        if (::testing::Test::HasFailure()) return;
      }
    }
  }
}

TEST_F(Int4GroupwiseGemm_Amx, MatchesDoubleSums_F32) { check_shapes<float>(); }
TEST_F(Int4GroupwiseGemm_Amx, MatchesDoubleSums_F16) { check_shapes<F16>(); }
TEST_F(Int4GroupwiseGemm_Amx, MatchesDoubleSums_BF16) { check_shapes<BF16>(); }

TEST_F(Int4GroupwiseGemm_Amx, MatchesDoubleSums_OtherGroupsAndScaleTypes) {
  for (const int64_t group_size : {16, 48, 80, 96, 240, 256}) {
    check_against_double<float, float>({97, 700, group_size});
    check_against_double<F16, BF16>({97, 1001, group_size});
  }
}

// One and two rows are multiplied as bytes, several groups in a tile; more rows as bf16 numbers, 4, 8 or 16 rows to a
// tile. The bits of a row must not tell which.
TEST_F(Int4GroupwiseGemm_Amx, RowBitsDoNotDependOnRowCount) {
  for (const int64_t group_size : {16, 32, 48, 64, 128, 256}) {
    SCOPED_TRACE(::testing::Message() << "Kg " << group_size);
    const GemmCase<float> wide({161, 600, group_size}, 2, kAmxKernel<float>);
    const GemmCase<F16> narrow({161, 600, group_size}, 3, kAmxKernel<F16>);
    const std::vector<float> longest = wide.run(kDistinctRows * 56);  // 392 rows: two passes
    const std::vector<F16> longest_narrow = narrow.run(kDistinctRows * 56);
    for (int64_t m = 1; m <= 25; ++m) {
      expect_equal_rows(wide.run(m), longest, 161, wide.row_stride(), m);
      expect_equal_rows(narrow.run(m), longest_narrow, 161, narrow.row_stride(), m);
    }
    for (int64_t row = kDistinctRows; row < kDistinctRows * 56; ++row) {
      ASSERT_EQ(std::memcmp(&longest[row * wide.row_stride()], &longest[row % kDistinctRows * wide.row_stride()],
                            161 * sizeof(float)),
                0)
          << "row " << row;
    }
  }
}

// The largest sums that digits can make: 256 times -8 times the least lower digits, beside upper digits of all sizes.
TEST_F(Int4GroupwiseGemm_Amx, SumsOfExtremeDigitsAreExact) {
  GemmCase<float> gemm_case({16, 256, 256}, 4, kAmxKernel<float>);
  std::fill(gemm_case.q().begin(), gemm_case.q().end(), uint8_t{0});
  gemm_case.pack();
  for (int64_t row = 0; row < kDistinctRows; ++row) {
    float* x = gemm_case.x_row(row);
    for (int64_t i = 0; i < 256; ++i) x[i] = static_cast<float>((row == 6 ? -1 : 1) * ((4096 >> row) * 16384 - 8192));
    x[255] = 0x1p26f - 4.0f;  // fixes the unit of the integers at 1
  }
  const std::vector<float> many = gemm_case.run(kDistinctRows);
  gemm_case.check(many, kDistinctRows);
  for (const int64_t m : {1, 2, 3, 4}) expect_equal_rows(gemm_case.run(m), many, 16, gemm_case.row_stride(), m);
}

TEST_F(Int4GroupwiseGemm_Amx, BitsDoNotDependOnThreadCount) {
  cpu::ThreadPool& pool = cpu::ThreadPool::shared();
  const int threads_before = pool.num_threads();
  const GemmCase<F16> gemm_case({576, 320, 64}, 5, kAmxKernel<F16>);
  for (const int64_t m : {1, 8, 100}) {
    pool.set_num_threads(1);
    const std::vector<F16> alone = gemm_case.run(m);
    for (const int threads : {2, 3}) {
      pool.set_num_threads(threads);
      const std::vector<F16> together = gemm_case.run(m);
      EXPECT_EQ(std::memcmp(alone.data(), together.data(), alone.size() * sizeof(F16)), 0)
          << threads << " threads, M " << m;
    }
  }
  pool.set_num_threads(threads_before);
}

// Rows that cannot be integers get the bits of the SIMD kernel; the others what they get without them.
TEST_F(Int4GroupwiseGemm_Amx, InfinityNanAndHugeNumbersStayInTheirRows) {
  const GemmExtents extents{100, 200, 32};
  GemmCase<float> clean(extents, 6, kAmxKernel<float>);
  GemmCase<float> dirty(extents, 6, kAmxKernel<float>);
  GemmCase<float> simd(extents, 6);
  for (GemmCase<float>* gemm_case : {&dirty, &simd}) {
    gemm_case->x_row(0)[199] = std::numeric_limits<float>::infinity();
    gemm_case->x_row(2)[7] = std::numeric_limits<float>::quiet_NaN();
    gemm_case->x_row(3)[64] = -0x1.8p127f;
  }
  const int64_t stride = dirty.row_stride();
  for (const int64_t m : {1, 2, 5, 9, 40}) {
    const std::vector<float> got = dirty.run(m);
    const std::vector<float> without = clean.run(m);
    const std::vector<float> of_simd = simd.run(m);
    for (int64_t row = 0; row < m; ++row) {
      const int64_t distinct = row % kDistinctRows;
      const bool is_dirty = distinct == 0 || distinct == 2 || distinct == 3;
      const std::vector<float>& wanted = is_dirty ? of_simd : without;
      ASSERT_EQ(std::memcmp(&got[row * stride], &wanted[row * stride], extents.n * sizeof(float)), 0)
          << "row " << row << " of " << m;
    }
  }
  const std::vector<float> row = dirty.run(1);
  for (int64_t column = 0; column < extents.n; ++column) {
    const int weight = dirty.q()[column * extents.k + 199] - 8;
    if (weight == 0) {
      ASSERT_TRUE(std::isnan(row[column])) << column;
    } else {
      ASSERT_EQ(row[column], weight * std::numeric_limits<float>::infinity()) << column;
    }
  }
}

TEST_F(Int4GroupwiseGemm_Amx, TinyAndZeroNumbers) {
  GemmCase<float> gemm_case({64, 128, 64}, 7, kAmxKernel<float>);
  for (int64_t i = 0; i < 64; ++i) {
    gemm_case.x_row(0)[i] = 0.0f;
    gemm_case.x_row(1)[i] *= 0x1p-80f;
    gemm_case.x_row(2)[i] *= 0x1p-120f;
    gemm_case.x_row(3)[i] *= 0x1p-140f;
    gemm_case.x_row(4)[i] *= 0x1p90f;
  }
  for (const int64_t m : {1, 7}) gemm_case.check(gemm_case.run(m), m);
}

TEST_F(Int4GroupwiseGemm_Amx, DepthZeroGivesZero) {
  const GemmCase<float> gemm_case({40, 0, 32}, 8, kAmxKernel<float>);
  for (const int64_t m : {1, 20}) {
    const std::vector<float> out = gemm_case.run(m);
    for (int64_t row = 0; row < m; ++row) {
      for (int64_t column = 0; column < 40; ++column) ASSERT_EQ(out[row * gemm_case.row_stride() + column], 0.0f);
    }
  }
  EXPECT_EQ(GemmCase<float>({0, 64, 32}, 8, kAmxKernel<float>).run(3).size(), 3u * testing::kRowGap);
}

TEST_F(Int4GroupwiseGemm_Amx, RefusesWhatTheSimdKernelRefuses_ByText) {
  Int4GroupwiseGemmProblem problem;
  problem.m = problem.n = problem.k = 1;
  problem.group_size = 40;
  EXPECT_EQ(cpu::supports_int4_groupwise_gemm_amx(problem).message(),
            "group_size is 40, wanted a multiple of 16 up to 256");
  problem.group_size = 32;
  EXPECT_EQ(cpu::int4_groupwise_gemm_amx(problem, {nullptr, 0}, {}).code(), StatusCode::kInternal);
}

}  // namespace
}  // namespace polyop
