#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "gemm_case.h"
#include "polyop/cpu/thread_pool.h"

namespace polyop {
namespace {

using testing::GemmCase;
using testing::GemmExtents;
using testing::on_every_vector_target;

constexpr int64_t kRowCounts[] = {0, 1, 3, 7, 64, 200};

template <class T>
void check_against_reference() {
  for (const int64_t n : {1, 33, 130, 576}) {
    for (const int64_t k : {32, 96, 576, 1000}) {
      for (const int64_t group_size : {32, 64, 128}) {
        SCOPED_TRACE(::testing::Message() << "N " << n << ", K " << k << ", Kg " << group_size);
        GemmCase<T> gemm_case(GemmExtents{n, k, group_size});
        on_every_vector_target([&] {
          for (const int64_t m : kRowCounts) {
            SCOPED_TRACE(::testing::Message() << "M " << m);
            gemm_case.check(gemm_case.run(m), m);
          }
        });
        if (::testing::Test::HasFailure()) return;
      }
    }
  }
}

TEST(Int4GroupwiseGemm_Cpu, Simd_MatchesReference_F32) { check_against_reference<float>(); }
TEST(Int4GroupwiseGemm_Cpu, Simd_MatchesReference_F16) { check_against_reference<F16>(); }
TEST(Int4GroupwiseGemm_Cpu, Simd_MatchesReference_BF16) { check_against_reference<BF16>(); }

TEST(Int4GroupwiseGemm_Cpu, Simd_MatchesReference_OtherGroupsAndScaleTypes) {
  for (const int64_t group_size : {16, 48, 96, 256}) {
    GemmCase<float, float> with_f32_scales(GemmExtents{97, 700, group_size});
    GemmCase<F16, BF16> with_bf16_scales(GemmExtents{97, 700, group_size});
    on_every_vector_target([&] {
      for (const int64_t m : {1, 5, 13}) {
        with_f32_scales.check(with_f32_scales.run(m), m);
        with_bf16_scales.check(with_bf16_scales.run(m), m);
      }
    });
  }
}

// Every row count takes its own path: 1 to 8 rows in registers, more through a widened panel with a tail, several
// blocks of rows, several passes. The bits of a row must not tell which.
TEST(Int4GroupwiseGemm_Cpu, Simd_RowBitsDoNotDependOnRowCount) {
  const GemmCase<float> gemm_case(GemmExtents{161, 304, 32});
  const int64_t n = gemm_case.extents().n;
  on_every_vector_target([&] {
    const std::vector<float> longest = gemm_case.run(testing::kDistinctRows * 56);  // 392 rows: two passes
    for (int64_t m = 1; m <= 30; ++m) {
      const std::vector<float> out = gemm_case.run(m);
      for (int64_t row = 0; row < m; ++row) {
        ASSERT_EQ(
            std::memcmp(&out[row * gemm_case.row_stride()], &longest[row * gemm_case.row_stride()], n * sizeof(float)),
            0)
            << "row " << row << " of " << m;
      }
    }
    for (size_t row = testing::kDistinctRows; row < 392; ++row) {
      ASSERT_EQ(std::memcmp(&longest[row * gemm_case.row_stride()],
                            &longest[row % testing::kDistinctRows * gemm_case.row_stride()], n * sizeof(float)),
                0)
          << "row " << row;
    }
  });
}

TEST(Int4GroupwiseGemm_Cpu, Simd_BitsDoNotDependOnThreadCount) {
  cpu::ThreadPool& pool = cpu::ThreadPool::shared();
  const int threads_before = pool.num_threads();
  const GemmCase<F16> gemm_case(GemmExtents{576, 320, 64});
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

#if HWY_ARCH_X86
TEST(Int4GroupwiseGemm_Cpu, Simd_BitsAreEqualOnTargetsWithFma) {
  const GemmCase<float> gemm_case(GemmExtents{130, 576, 32});
  for (const int64_t m : {1, 5, 50}) {
    std::vector<float> first;
    on_every_vector_target([&] {
      if (hwy::SupportedTargets() > HWY_AVX2) return;  // rounds products and sums apart
      const std::vector<float> out = gemm_case.run(m);
      if (first.empty()) first = out;
      EXPECT_EQ(std::memcmp(first.data(), out.data(), out.size() * sizeof(float)), 0);
    });
  }
}
#endif

TEST(Int4GroupwiseGemm_Cpu, Simd_DepthZeroGivesZero) {
  const GemmCase<float> gemm_case(GemmExtents{40, 0, 32});
  for (const int64_t m : {1, 20}) {
    const std::vector<float> out = gemm_case.run(m);
    for (int64_t row = 0; row < m; ++row) {
      for (int64_t column = 0; column < 40; ++column) ASSERT_EQ(out[row * gemm_case.row_stride() + column], 0.0f);
    }
  }
  EXPECT_EQ(GemmCase<float>(GemmExtents{0, 64, 32}).run(3).size(), 3u * testing::kRowGap);
}

TEST(Int4GroupwiseGemm_Cpu, Simd_RefusesOtherGroupSizes_ByText) {
  Int4GroupwiseGemmProblem problem;
  problem.m = problem.n = problem.k = 1;
  problem.group_size = 40;
  EXPECT_EQ(cpu::supports_int4_groupwise_gemm_simd(problem).message(),
            "group_size is 40, wanted a multiple of 16 up to 256");
  problem.group_size = 512;
  EXPECT_EQ(cpu::supports_int4_groupwise_gemm_simd(problem).message(),
            "group_size is 512, wanted a multiple of 16 up to 256");
  problem.group_size = 32;
  const Status status = cpu::int4_groupwise_gemm_simd(problem, {nullptr, 0}, {});
  EXPECT_EQ(status.code(), StatusCode::kInternal);
}

}  // namespace
}  // namespace polyop
