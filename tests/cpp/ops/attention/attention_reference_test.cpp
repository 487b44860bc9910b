// The reference against numbers worked out by hand. Head size 1 and q = 0 make every weight 1 / (visible keys), so a
// row is the mean of the values that it sees: the probe that shows a mask at a glance.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "polyop/core/numeric_types.h"
#include "polyop/ops/attention/attention_kernels.h"

namespace polyop::testing {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// One padded sequence, one head, D = Dv = 1, f32; values are 1, 2, 3, ... Fields may be changed before run().
struct Probe {
  AttentionProblem problem;
  std::vector<float> q, k, v, out, lse;

  Probe(int64_t rows, int64_t keys) : q(rows, 0.0f), k(keys, 1.0f), v(keys), out(rows, kNan), lse(rows, kNan) {
    std::iota(v.begin(), v.end(), 1.0f);
    problem.num_sequences = problem.num_query_heads = problem.num_kv_heads = 1;
    problem.head_dim = problem.value_head_dim = 1;
    problem.query_form = AttentionQueryForm::kPadded;
    problem.kv_form = AttentionKvForm::kPadded;
    problem.num_query_rows = problem.padded_query_length = rows;
    problem.kv_capacity = keys;
    problem.causal = AttentionCausal::kNone;
    problem.q = {q.data(), DType::kF32, rows, 1, 1};
    problem.out = {out.data(), DType::kF32, rows, 1, 1};
    problem.lse = {lse.data(), DType::kF32, rows, 1, 1};
    problem.k = {k.data(), DType::kF32, keys, 1, 1};
    problem.v = {v.data(), DType::kF32, keys, 1, 1};
  }

  void run() {
    std::vector<double> workspace(static_cast<size_t>(problem.kv_capacity) + 1, std::nan(""));
    ASSERT_TRUE(attention_reference(problem, {workspace.data(), problem.kv_capacity * 8}, {}).is_ok());
  }
};

// Mean of begin + 1 .. end: the value of a row that sees keys [begin, end).
float mean_of(int64_t begin, int64_t end) { return begin >= end ? 0.0f : static_cast<float>(begin + 1 + end) / 2.0f; }

TEST(Attention_Reference, CausalAlignment) {
  for (const auto& [rows, keys] : {std::pair{4, 16}, {16, 4}, {1, 128}, {5, 5}}) {
    for (AttentionCausal causal : {AttentionCausal::kNone, AttentionCausal::kUpperLeft, AttentionCausal::kLowerRight}) {
      Probe probe(rows, keys);
      probe.problem.causal = causal;
      probe.run();
      for (int64_t i = 0; i < rows; ++i) {
        const int64_t position = causal == AttentionCausal::kUpperLeft ? i : i + keys - rows;
        const int64_t end = causal == AttentionCausal::kNone ? keys : std::min<int64_t>(keys, position + 1);
        EXPECT_EQ(probe.out[i], mean_of(0, end)) << rows << " x " << keys << " row " << i;
        EXPECT_FLOAT_EQ(probe.lse[i], end <= 0 ? -kInfinity : std::log(static_cast<float>(end)));
      }
    }
  }
}

TEST(Attention_Reference, LengthsHideKeysAndRows) {
  Probe probe(4, 6);
  const int32_t query_length = 3;
  const int32_t kv_length = 5;
  probe.problem.query_lengths = &query_length;
  probe.problem.kv_lengths = &kv_length;
  probe.problem.causal = AttentionCausal::kLowerRight;
  probe.q[3] = kNan;
  probe.k[5] = probe.v[5] = kNan;
  probe.run();
  EXPECT_EQ(probe.out, (std::vector<float>{mean_of(0, 3), mean_of(0, 4), mean_of(0, 5), 0.0f}));
  EXPECT_EQ(probe.lse[3], -kInfinity);
}

TEST(Attention_Reference, SlidingWindow) {
  Probe probe(3, 8);
  probe.problem.causal = AttentionCausal::kLowerRight;
  probe.problem.window = 2;
  probe.run();
  EXPECT_EQ(probe.out, (std::vector<float>{mean_of(4, 6), mean_of(5, 7), mean_of(6, 8)}));
  probe.problem.window_end = AttentionWindowEnd::kLastKey;
  probe.run();
  EXPECT_EQ(probe.out, (std::vector<float>{0.0f, mean_of(6, 7), mean_of(6, 8)}));
  probe.problem.window = 0;
  probe.run();
  EXPECT_EQ(probe.out, (std::vector<float>{0.0f, 0.0f, 0.0f}));
}

TEST(Attention_Reference, BoolMask) {
  Probe probe(2, 3);
  const bool mask[] = {true, false, true, false, false, false};
  probe.k[1] = kNan;
  probe.v[1] = kNan;
  probe.problem.mask = {mask, DType::kBool, 0, 0, 3, 1};
  probe.run();
  EXPECT_EQ(probe.out, (std::vector<float>{2.0f, 0.0f}));
  EXPECT_EQ(probe.lse[1], -kInfinity);
  // One row for all: stride 0.
  probe.problem.mask.row_stride = 0;
  probe.run();
  EXPECT_EQ(probe.out, (std::vector<float>{2.0f, 2.0f}));
}

TEST(Attention_Reference, AdditiveMask) {
  Probe probe(3, 3);
  const float mask[] = {0.0f, -kInfinity, std::log(3.0f), -kInfinity, -kInfinity, -kInfinity, -1e30f, -1e30f, -1e30f};
  probe.v[1] = kNan;
  probe.problem.mask = {mask, DType::kF32, 0, 0, 3, 1};
  probe.run();
  EXPECT_FLOAT_EQ(probe.out[0], (1.0f + 3.0f * 3.0f) / 4.0f);
  EXPECT_EQ(probe.out[1], 0.0f);
  EXPECT_TRUE(std::isnan(probe.out[2]));  // a large finite bias hides nothing
}

TEST(Attention_Reference, TreeMask) {
  // Prefix of two keys, then three columns, one for each row.
  Probe probe(3, 5);
  const int32_t words[] = {0b001, 0b011, 0b101};
  probe.problem.tree_mask = {words, 1};
  probe.run();
  EXPECT_FLOAT_EQ(probe.out[0], (1 + 2 + 3) / 3.0f);
  EXPECT_FLOAT_EQ(probe.out[1], (1 + 2 + 3 + 4) / 4.0f);
  EXPECT_FLOAT_EQ(probe.out[2], (1 + 2 + 3 + 5) / 4.0f);
}

TEST(Attention_Reference, TreeMaskWithoutPrefixAndWithSeveralWords) {
  Probe probe(40, 40);
  std::vector<int32_t> words(80, 0);
  words[2 * 1] = 1;                                    // row 1 sees column 0
  words[2 * 2 + 1] = 1 << 7;                           // row 2 sees column 39
  words[2 * 3] = std::numeric_limits<int32_t>::min();  // row 3 sees column 31
  probe.problem.tree_mask = {words.data(), 2};
  probe.run();
  EXPECT_EQ(probe.out[0], 0.0f);
  EXPECT_EQ(probe.lse[0], -kInfinity);
  EXPECT_EQ(probe.out[1], 1.0f);
  EXPECT_EQ(probe.out[2], 40.0f);
  EXPECT_EQ(probe.out[3], 32.0f);
}

TEST(Attention_Reference, SinksJoinTheDenominatorOnly) {
  Probe probe(1, 2);
  const float sink = std::log(2.0f);
  probe.problem.sinks = &sink;
  probe.run();
  EXPECT_FLOAT_EQ(probe.out[0], (1.0f + 2.0f) / 4.0f);
  EXPECT_FLOAT_EQ(probe.lse[0], std::log(4.0f));
  const int32_t nothing = 0;
  probe.problem.kv_lengths = &nothing;
  probe.run();
  EXPECT_EQ(probe.out[0], 0.0f);
  EXPECT_EQ(probe.lse[0], -kInfinity);
}

TEST(Attention_Reference, WithoutNormalizationTheScoresAreTheWeights) {
  Probe probe(1, 2);
  probe.q[0] = 3.0f;
  probe.k = {1.0f, -2.0f};
  probe.problem.k.data = probe.k.data();
  probe.problem.scale = 0.5f;
  probe.problem.normalization = AttentionNormalization::kNone;
  probe.run();
  EXPECT_FLOAT_EQ(probe.out[0], 1.5f * 1.0f - 3.0f * 2.0f);
}

TEST(Attention_Reference, QuantizedWeightsAreThoseAfterNormalization) {
  Probe probe(1, 3);
  const float scale = 1.0f / 127.0f;
  probe.problem.weight_quantization = AttentionWeightQuantization::kInt8;
  probe.problem.weight_scale = &scale;
  probe.run();
  EXPECT_FLOAT_EQ(probe.out[0], 6.0f * 42.0f / 127.0f);  // 127 / 3 = 42.33 rounds to 42
  const float fp8_scale = 1.0f / 448.0f;
  probe.problem.weight_quantization = AttentionWeightQuantization::kF8E4M3;
  probe.problem.weight_scale = &fp8_scale;
  probe.run();
  EXPECT_FLOAT_EQ(probe.out[0], 6.0f * 144.0f / 448.0f);  // 448 / 3 = 149.33 lies between 144 and 160
}

TEST(Attention_Reference, QuantizedCacheAndOutput) {
  Probe probe(1, 2);
  const int8_t k[] = {2, 4};
  const int8_t v[] = {-3, 5};
  const float k_scale[] = {0.5f};
  const float v_scale[] = {10.0f};
  const float output_scale = 0.25f;
  F8E4M3 out{0};
  probe.q[0] = std::log(3.0f);
  probe.problem.k = {const_cast<int8_t*>(k), DType::kI8, 2, 1, 1};
  probe.problem.v = {const_cast<int8_t*>(v), DType::kI8, 2, 1, 1};
  probe.problem.k_scale = {k_scale, 0};
  probe.problem.v_scale = {v_scale, 0};
  probe.problem.out = {&out, DType::kF8E4M3, 1, 1, 1};
  probe.problem.output_scale = &output_scale;
  probe.run();
  // Scores ln 3 and 2 ln 3, weights 1/4 and 3/4: (-3 + 15) / 4 * 10 = 30, stored as 120.
  EXPECT_EQ(out.to_float(), 120.0f);
}

TEST(Attention_Reference, NanInAScoreSpoilsItsRowOnly) {
  Probe probe(2, 2);
  probe.q[1] = kNan;
  probe.run();
  EXPECT_EQ(probe.out[0], 1.5f);
  EXPECT_TRUE(std::isnan(probe.out[1]));
}

TEST(Attention_Kernels, TheReferenceIsLastAndTakesWhatTheFastKernelsRefuse) {
  Probe probe(1, 1);
  const auto kernels = attention_kernels();
  const Kernel<AttentionProblem>* chosen = nullptr;
  ASSERT_TRUE(choose_kernel("attention", kernels, DeviceType::kCpu, probe.problem, &chosen).is_ok());
  EXPECT_EQ(chosen->name, "cpu_flash_attention");
  probe.problem.normalization = AttentionNormalization::kNone;
  ASSERT_TRUE(choose_kernel("attention", kernels, DeviceType::kCpu, probe.problem, &chosen).is_ok());
  EXPECT_EQ(chosen->name, "cpu_row_attention");
  probe.problem.q.dtype = DType::kF8E4M3;
  ASSERT_TRUE(choose_kernel("attention", kernels, DeviceType::kCpu, probe.problem, &chosen).is_ok());
  EXPECT_EQ(chosen->name, "reference");
  EXPECT_EQ(chosen, &kernels.back());
}

}  // namespace
}  // namespace polyop::testing
