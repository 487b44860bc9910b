// int4_groupwise_gemm through its schema: any strides and ranks, any group size, texts of refusals.
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "polyop/ops/int4_groupwise_gemm/packing.h"
#include "tests/cpp/testing/call_kernel.h"
#include "tests/cpp/testing/guarded_tensor.h"

namespace polyop {
namespace {

using testing::Call;
using testing::call_kernel;
using testing::GuardedTensor;
using testing::refusal;

// Operands of out [2, 3, 40] = x [2, 3, 96] times w [40, 96], groups of 32.
struct Operands {
  explicit Operands(std::vector<int64_t> x_gaps = {}, std::vector<int64_t> out_gaps = {},
                    std::vector<int64_t> scales_gaps = {})
      : x(DType::kF32, {2, 3, 96}, x_gaps),
        scales(DType::kF16, {3, 40}, scales_gaps),
        out(DType::kF32, {2, 3, 40}, out_gaps) {
    std::mt19937 random(3);
    for (uint8_t& value : q) value = random() & 15;
    EXPECT_TRUE(pack_int4_fragments(q.data(), 40, 96, &qweight.at<uint8_t>(0)).is_ok());
    x.fill_floats(random, 1.0f);
    scales.fill_floats(random, 0.02f);
  }

  Call call(int64_t group_size = 32) {
    return {"int4_groupwise_gemm",
            {{"x", x}, {"qweight", qweight}, {"scales", scales}, {"out", out}},
            {{"group_size", AttributeValue::of_int(group_size)}}};
  }

  std::vector<uint8_t> q = std::vector<uint8_t>(40 * 96);
  GuardedTensor x;
  GuardedTensor qweight = GuardedTensor(DType::kI8, {16, 512});
  GuardedTensor scales;
  GuardedTensor out;
};

TEST(Int4GroupwiseGemm, LeadingAxesThatNoStrideCanWalk_GiveTheBitsOfDenseOnes) {
  for (const std::string_view kernel : {"cpu_amx", "cpu_simd", "reference"}) {
    Operands dense;
    const Status status = call_kernel(dense.call(), kernel);
    if (kernel == "cpu_amx" && status.code() == StatusCode::kUnsupported) continue;  // this machine has none
    ASSERT_EQ(status.message(), "");
    Operands strided({0, 2, 5}, {0, 1, 3}, {0, 7});
    ASSERT_EQ(call_kernel(strided.call(), kernel).message(), "");
    EXPECT_TRUE(strided.out.guards_intact());
    for (int64_t i = 0; i < dense.out.size(); ++i) {
      ASSERT_EQ(strided.out.at<float>(i), dense.out.at<float>(i)) << kernel << " " << i;
    }
  }
}

TEST(Int4GroupwiseGemm, VectorOfRankOne_IsOneRow) {
  Operands all;
  ASSERT_EQ(call_kernel(all.call()).message(), "");
  GuardedTensor x(DType::kF32, {96});
  for (int64_t i = 0; i < 96; ++i) x.at<float>(i) = all.x.at<float>(i);
  GuardedTensor out(DType::kF32, {40});
  Call call = all.call();
  call.operands[0].tensor = x;
  call.operands[3].tensor = out;
  ASSERT_EQ(call_kernel(call).message(), "");
  for (int64_t i = 0; i < 40; ++i) ASSERT_EQ(out.at<float>(i), all.out.at<float>(i)) << i;
}

TEST(Int4GroupwiseGemm, GroupSizeWithoutKernel_RunsTheReference) {
  Operands operands;
  operands.scales = GuardedTensor(DType::kF16, {3, 40});
  std::mt19937 random(4);
  operands.scales.fill_floats(random, 0.02f);
  ASSERT_EQ(call_kernel(operands.call(40)).message(), "");  // ceil(96 / 40) = 3 groups
  for (int64_t column = 0; column < 40; ++column) {
    double expected = 0.0;
    for (int64_t k = 0; k < 96; ++k) {
      expected += static_cast<double>(operands.x.at<float>(k)) * (operands.q[column * 96 + k] - 8) *
                  operands.scales.at<F16>({k / 40, column}).to_float();
    }
    ASSERT_NEAR(operands.out.at<float>(column), expected, 1e-6 * std::abs(expected) + 1e-7) << column;
  }
}

TEST(Int4GroupwiseGemm, Refusals_NameOperandAxisGotAndWanted) {
  Operands good;
  const auto with = [&](size_t operand, GuardedTensor& tensor) {
    Call call = good.call();
    call.operands[operand].tensor = tensor;
    return refusal(call);
  };
  GuardedTensor short_weights(DType::kI8, {8, 512});
  EXPECT_EQ(with(1, short_weights),
            "int4_groupwise_gemm: qweight axis 0 (ceil(N / 128) * ceil(K / 64) * 8) is 8, wanted 16");
  GuardedTensor wide_weights(DType::kI8, {16, 256});
  EXPECT_EQ(with(1, wide_weights), "int4_groupwise_gemm: qweight axis 1 (512) is 256, wanted 512");
  GuardedTensor few_scales(DType::kF16, {2, 40});
  EXPECT_EQ(with(2, few_scales), "int4_groupwise_gemm: scales axis 0 (ceil(K / group_size)) is 2, wanted 3");
  GuardedTensor long_x(DType::kI32, {2, 3, 96});
  EXPECT_EQ(with(0, long_x), "int4_groupwise_gemm: x is i32, wanted f32, f16 or bf16");
  GuardedTensor half_out(DType::kF16, {2, 3, 40});
  EXPECT_EQ(with(3, half_out), "int4_groupwise_gemm: out is f16, wanted f32 as x");
  EXPECT_EQ(refusal(good.call(0)), "int4_groupwise_gemm: attribute group_size is 0, wanted at least 1");
  Call no_group = good.call();
  no_group.attributes.clear();
  EXPECT_EQ(refusal(no_group), "int4_groupwise_gemm: attribute group_size is missing");
  TensorView transposed = good.x.view();
  transposed.strides[2] = 2;
  Call strided = good.call();
  strided.operands[0].tensor = transposed;
  EXPECT_EQ(refusal(strided), "int4_groupwise_gemm: x axis 2 has stride 2, wanted 1");
}

}  // namespace
}  // namespace polyop
