// rotary_embedding: every kernel against the reference within the README's bound, in place and out of place, and
// refusals.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <optional>

#include "polyop/cpu/thread_pool.h"
#include "tests/cpp/testing/call_kernel.h"
#include "tests/cpp/testing/guarded_tensor.h"
#include "tests/cpp/testing/simd_targets.h"

namespace polyop {
namespace {

using testing::Call;
using testing::call_kernel;
using testing::GuardedTensor;
using testing::refusal;

struct Shape {
  int64_t tokens;
  int64_t query_heads;
  int64_t kv_heads;
  int64_t head_dim;
  int64_t rotary_dim;
  int64_t capacity = 7;
};

/// Rows of cosines and sines of arbitrary angles.
GuardedTensor make_cos_sin(int64_t capacity, int64_t rotary_dim, int64_t gap, std::mt19937& random) {
  GuardedTensor table(DType::kF32, {capacity, rotary_dim}, {0, gap});
  std::uniform_real_distribution<double> angle(-4.0, 4.0);
  for (int64_t row = 0; row < capacity; ++row) {
    for (int64_t pair = 0; pair < rotary_dim / 2; ++pair) {
      const double a = angle(random);
      table.at<float>({row, pair}) = static_cast<float>(std::cos(a));
      table.at<float>({row, pair + rotary_dim / 2}) = static_cast<float>(std::sin(a));
    }
  }
  return table;
}

GuardedTensor make_positions(DType dtype, int64_t tokens, int64_t capacity, std::mt19937& random) {
  GuardedTensor ids(dtype, {tokens});
  for (int64_t t = 0; t < tokens; ++t) {
    const int64_t position = static_cast<int64_t>(random() % static_cast<uint64_t>(capacity));
    if (dtype == DType::kI64) {
      ids.at<int64_t>(t) = position;
    } else {
      ids.at<int32_t>(t) = static_cast<int32_t>(position);
    }
  }
  return ids;
}

/// The bound of the README: u_out |exact| + 3 u_32 (|x1 c| + |x2 s|) + least step, checked for every channel of `out`.
void expect_within_bound(GuardedTensor& x, GuardedTensor& cos_sin, const std::vector<int64_t>& positions,
                         GuardedTensor& out, bool interleaved) {
  const TensorView view = x.view();
  const int64_t rotary_dim = cos_sin.view().shape[1];
  const DType dtype = view.dtype;
  const double u_out = dtype == DType::kF32 ? 0.0 : dtype == DType::kF16 ? 0x1p-11 : 0x1p-8;
  const double least_step = dtype == DType::kF16 ? 0x1p-25 : 0x1p-133;
  double worst = 0.0;
  std::string worst_text;
  for (int64_t t = 0; t < view.shape[0]; ++t) {
    for (int64_t h = 0; h < view.shape[1]; ++h) {
      const int64_t base = (t * view.shape[1] + h) * view.shape[2];
      for (int64_t channel = 0; channel < view.shape[2]; ++channel) {
        if (channel >= rotary_dim) {
          ASSERT_EQ(x.get_float(base + channel), out.get_float(base + channel)) << "channel " << channel;
          continue;
        }
        const int64_t half = rotary_dim / 2;
        const bool is_first = interleaved ? channel % 2 == 0 : channel < half;
        const int64_t pair = interleaved ? channel / 2 : channel % half;
        const int64_t partner = interleaved ? channel ^ 1 : (channel + half) % rotary_dim;
        const double c = cos_sin.at<float>({positions[static_cast<size_t>(t)], pair});
        const double s = cos_sin.at<float>({positions[static_cast<size_t>(t)], pair + half});
        const double a = x.get_float(base + channel) * c;
        const double b = x.get_float(base + partner) * s;
        const double exact = is_first ? a - b : a + b;
        const double bound = u_out * std::abs(exact) + 3 * 0x1p-24 * (std::abs(a) + std::abs(b)) + least_step;
        const double error = std::abs(out.get_float(base + channel) - exact);
        if (error / bound > worst) {
          worst = error / bound;
          worst_text = "token " + std::to_string(t) + " head " + std::to_string(h) + " channel " +
                       std::to_string(channel) + ": " + std::to_string(out.get_float(base + channel)) + ", exact " +
                       std::to_string(exact) + ", bound " + std::to_string(bound);
        }
      }
    }
  }
  EXPECT_LE(worst, 1.0) << worst_text;
}

class RotaryEmbedding : public ::testing::TestWithParam<std::tuple<DType, bool>> {
 protected:
  [[nodiscard]] DType dtype() const { return std::get<0>(GetParam()); }
  [[nodiscard]] bool interleaved() const { return std::get<1>(GetParam()); }
  [[nodiscard]] std::vector<NamedAttribute> attributes() const {
    return {{"interleaved", AttributeValue::of_bool(interleaved())}};
  }
};

INSTANTIATE_TEST_SUITE_P(AllForms, RotaryEmbedding,
                         ::testing::Combine(::testing::Values(DType::kF32, DType::kF16, DType::kBF16),
                                            ::testing::Bool()),
                         [](const auto& info) {
                           return std::string(dtype_name(std::get<0>(info.param))) +
                                  (std::get<1>(info.param) ? "_interleaved" : "_half_split");
                         });

const Shape kShapes[] = {
    {.tokens = 0, .query_heads = 2, .kv_heads = 1, .head_dim = 8, .rotary_dim = 8},
    {.tokens = 1, .query_heads = 9, .kv_heads = 3, .head_dim = 64, .rotary_dim = 64},
    {.tokens = 5, .query_heads = 2, .kv_heads = 2, .head_dim = 128, .rotary_dim = 96},
    {.tokens = 7, .query_heads = 1, .kv_heads = 1, .head_dim = 2, .rotary_dim = 2},
    {.tokens = 3, .query_heads = 3, .kv_heads = 1, .head_dim = 19, .rotary_dim = 6},
    {.tokens = 4, .query_heads = 2, .kv_heads = 2, .head_dim = 80, .rotary_dim = 78},
    {.tokens = 2, .query_heads = 1, .kv_heads = 1, .head_dim = 5, .rotary_dim = 0},
    {.tokens = 2, .query_heads = 0, .kv_heads = 1, .head_dim = 10, .rotary_dim = 10},
    {.tokens = 400, .query_heads = 4, .kv_heads = 2, .head_dim = 72, .rotary_dim = 44, .capacity = 500},
};

TEST_P(RotaryEmbedding, Kernels_StayWithinBound_AllShapes) {
  std::mt19937 random(1);
  for (const Shape& shape : kShapes) {
    for (const std::optional<DType> ids_dtype :
         {std::optional<DType>{}, std::optional(DType::kI32), std::optional(DType::kI64)}) {
      for (const std::string_view kernel : {"cpu_rows", "reference"}) {
        SCOPED_TRACE(std::string(kernel) + " T " + std::to_string(shape.tokens) + " D " +
                     std::to_string(shape.head_dim) + " Drot " + std::to_string(shape.rotary_dim));
        GuardedTensor q(dtype(), {shape.tokens, shape.query_heads, shape.head_dim}, {0, 1, 3});
        GuardedTensor k(dtype(), {shape.tokens, shape.kv_heads, shape.head_dim});
        GuardedTensor q_out(dtype(), {shape.tokens, shape.query_heads, shape.head_dim}, {2, 0, 1});
        GuardedTensor k_out(dtype(), {shape.tokens, shape.kv_heads, shape.head_dim}, {0, 2, 0});
        q.fill_floats(random, 3.0f);
        k.fill_floats(random, 3.0f);
        GuardedTensor cos_sin = make_cos_sin(shape.capacity, shape.rotary_dim, 5, random);
        Call call{"rotary_embedding",
                  {{"q", q}, {"k", k}, {"cos_sin", cos_sin}, {"q_out", q_out}, {"k_out", k_out}},
                  attributes()};
        std::vector<int64_t> positions;
        GuardedTensor ids = make_positions(ids_dtype.value_or(DType::kI32), shape.tokens, shape.capacity, random);
        for (int64_t t = 0; t < shape.tokens; ++t) {
          positions.push_back(!ids_dtype ? t : *ids_dtype == DType::kI64 ? ids.at<int64_t>(t) : ids.at<int32_t>(t));
        }
        if (ids_dtype) call.operands.push_back({"position_ids", ids});
        const std::vector<uint8_t> q_before = q.memory();
        const Status status = call_kernel(call, kernel);
        ASSERT_TRUE(status.is_ok()) << status.message();
        expect_within_bound(q, cos_sin, positions, q_out, interleaved());
        expect_within_bound(k, cos_sin, positions, k_out, interleaved());
        EXPECT_TRUE(q_out.guards_intact());
        EXPECT_TRUE(k_out.guards_intact());
        EXPECT_EQ(q.memory(), q_before);
      }
    }
  }
}

TEST_P(RotaryEmbedding, InPlaceInOneFusedBuffer_EqualsOutOfPlace_BitForBit) {
  std::mt19937 random(2);
  for (const Shape& shape : kShapes) {
    SCOPED_TRACE("T " + std::to_string(shape.tokens) + " D " + std::to_string(shape.head_dim));
    const int64_t columns = (shape.query_heads + 2 * shape.kv_heads) * shape.head_dim;
    GuardedTensor fused(dtype(), {shape.tokens, columns}, {0, 4});
    fused.fill_floats(random, 2.0f);
    GuardedTensor original = fused;
    GuardedTensor cos_sin = make_cos_sin(500, shape.rotary_dim, 0, random);
    const auto heads = [&](GuardedTensor& buffer, int64_t first_head, int64_t count) {
      TensorView view = buffer.view();
      view.rank = 3;
      view.shape = {shape.tokens, count, shape.head_dim};
      view.strides = {columns + 4, shape.head_dim, 1};
      view.data = static_cast<char*>(view.data) + first_head * shape.head_dim * dtype_bytes(dtype());
      return view;
    };
    GuardedTensor q_out(dtype(), {shape.tokens, shape.query_heads, shape.head_dim});
    GuardedTensor k_out(dtype(), {shape.tokens, shape.kv_heads, shape.head_dim});
    ASSERT_TRUE(call_kernel({"rotary_embedding",
                             {{"q", heads(original, 0, shape.query_heads)},
                              {"k", heads(original, shape.query_heads, shape.kv_heads)},
                              {"cos_sin", cos_sin},
                              {"q_out", q_out},
                              {"k_out", k_out}},
                             attributes()})
                    .is_ok());
    const TensorView q = heads(fused, 0, shape.query_heads);
    const TensorView k = heads(fused, shape.query_heads, shape.kv_heads);
    const Status status = call_kernel(
        {"rotary_embedding", {{"q", q}, {"k", k}, {"cos_sin", cos_sin}, {"q_out", q}, {"k_out", k}}, attributes()});
    ASSERT_TRUE(status.is_ok()) << status.message();
    EXPECT_TRUE(fused.guards_intact());
    // The fused buffer must now be: rotated q, rotated k, and the v columns as they were.
    for (int64_t t = 0; t < shape.tokens; ++t) {
      for (int64_t column = 0; column < columns; ++column) {
        const int64_t q_columns = shape.query_heads * shape.head_dim;
        const int64_t k_columns = shape.kv_heads * shape.head_dim;
        const float wanted = column < q_columns               ? q_out.get_float(t * q_columns + column)
                             : column < q_columns + k_columns ? k_out.get_float(t * k_columns + column - q_columns)
                                                              : original.get_float(t * columns + column);
        ASSERT_EQ(fused.get_float(t * columns + column), wanted) << "token " << t << " column " << column;
      }
    }
  }
}

TEST_P(RotaryEmbedding, Row_HasTheSameBits_AloneAndInABatch_WithAnyThreads) {
  std::mt19937 random(3);
  constexpr int64_t kTokens = 300;
  GuardedTensor q(dtype(), {kTokens, 5, 88});
  q.fill_floats(random, 1.0f);
  GuardedTensor cos_sin = make_cos_sin(64, 76, 0, random);
  GuardedTensor ids = make_positions(DType::kI32, kTokens, 64, random);
  std::vector<std::vector<uint8_t>> results;
  const int threads_before = cpu::ThreadPool::shared().num_threads();
  for (const int threads : {1, 2, 3}) {
    cpu::ThreadPool::shared().set_num_threads(threads);
    GuardedTensor out(dtype(), {kTokens, 5, 88});
    ASSERT_TRUE(
        call_kernel(
            {"rotary_embedding", {{"q", q}, {"cos_sin", cos_sin}, {"position_ids", ids}, {"q_out", out}}, attributes()})
            .is_ok());
    results.push_back(out.memory());
  }
  cpu::ThreadPool::shared().set_num_threads(threads_before);
  EXPECT_EQ(results[0], results[1]);
  EXPECT_EQ(results[0], results[2]);

  GuardedTensor out(dtype(), {kTokens, 5, 88});
  for (int64_t t = 0; t < kTokens; ++t) {
    const auto row = [&](GuardedTensor& tensor) {
      TensorView view = tensor.view();
      view.data = static_cast<char*>(view.data) + t * view.strides[0] * dtype_bytes(view.dtype);
      view.shape[0] = 1;
      return view;
    };
    ASSERT_TRUE(call_kernel({"rotary_embedding",
                             {{"q", row(q)}, {"cos_sin", cos_sin}, {"position_ids", row(ids)}, {"q_out", row(out)}},
                             attributes()})
                    .is_ok());
  }
  EXPECT_EQ(results[0], out.memory());
}

// Without a fused multiply-add the f32 result is two rounded products and a rounded sum, on every processor and in
// every tail: the scalar line below is all there is.
TEST(RotaryEmbedding_Cpu, Rows_F32_EqualsScalarFormula_BitForBit_EveryTarget) {
  testing::on_every_simd_target([] {
    std::mt19937 random(4);
    for (int64_t rotary_dim = 0; rotary_dim <= 70; rotary_dim += 2) {
      GuardedTensor q(DType::kF32, {3, 2, 70});
      q.fill_floats(random, 10.0f);
      GuardedTensor cos_sin = make_cos_sin(3, rotary_dim, 0, random);
      for (const bool interleaved : {false, true}) {
        GuardedTensor out(DType::kF32, {3, 2, 70});
        ASSERT_TRUE(call_kernel({"rotary_embedding",
                                 {{"q", q}, {"cos_sin", cos_sin}, {"q_out", out}},
                                 {{"interleaved", AttributeValue::of_bool(interleaved)}}},
                                "cpu_rows")
                        .is_ok());
        for (int64_t row = 0; row < 6; ++row) {
          for (int64_t pair = 0; pair < rotary_dim / 2; ++pair) {
            const int64_t first = row * 70 + (interleaved ? 2 * pair : pair);
            const int64_t second = row * 70 + (interleaved ? 2 * pair + 1 : pair + rotary_dim / 2);
            const float c = cos_sin.at<float>({row / 2, pair});
            const float s = cos_sin.at<float>({row / 2, pair + rotary_dim / 2});
            const float x1 = q.at<float>(first);
            const float x2 = q.at<float>(second);
            ASSERT_EQ(out.at<float>(first), x1 * c - x2 * s) << "Drot " << rotary_dim << " pair " << pair;
            ASSERT_EQ(out.at<float>(second), x2 * c + x1 * s) << "Drot " << rotary_dim << " pair " << pair;
          }
        }
      }
    }
  });
}

TEST(RotaryEmbedding_Cpu, Rows_F16AndBf16_HaveTheSameBits_OnEveryTarget) {
  std::mt19937 random(6);
  for (const DType dtype : {DType::kF16, DType::kBF16}) {
    GuardedTensor q(dtype, {5, 3, 108});
    q.fill_floats(random, 4.0f);
    GuardedTensor cos_sin = make_cos_sin(5, 102, 0, random);
    for (const bool interleaved : {false, true}) {
      std::vector<std::vector<uint8_t>> results;
      testing::on_every_simd_target([&] {
        GuardedTensor out(dtype, {5, 3, 108});
        ASSERT_TRUE(call_kernel({"rotary_embedding",
                                 {{"q", q}, {"cos_sin", cos_sin}, {"q_out", out}},
                                 {{"interleaved", AttributeValue::of_bool(interleaved)}}},
                                "cpu_rows")
                        .is_ok());
        results.push_back(out.memory());
      });
      for (const std::vector<uint8_t>& result : results) EXPECT_EQ(result, results[0]) << dtype_name(dtype);
    }
  }
}

TEST(RotaryEmbedding_Cpu, PassThroughChannels_KeepNanPayloads) {
  std::mt19937 random(5);
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    GuardedTensor q(dtype, {4, 3, 21});
    q.fill_bits(random);
    GuardedTensor out(dtype, {4, 3, 21});
    GuardedTensor cos_sin(DType::kF32, {4, 0});
    ASSERT_TRUE(call_kernel({"rotary_embedding", {{"q", q}, {"cos_sin", cos_sin}, {"q_out", out}}, {}}).is_ok());
    EXPECT_EQ(q.memory(), out.memory()) << dtype_name(dtype);
  }
}

class RotaryEmbeddingRefusals : public ::testing::Test {
 protected:
  GuardedTensor q{DType::kF16, {3, 4, 8}};
  GuardedTensor k{DType::kF16, {3, 2, 8}};
  GuardedTensor q_out{DType::kF16, {3, 4, 8}};
  GuardedTensor k_out{DType::kF16, {3, 2, 8}};
  GuardedTensor cos_sin{DType::kF32, {5, 8}};
  GuardedTensor ids{DType::kI32, {3}};

  void SetUp() override { ids.fill<int32_t>({0, 4, 2}); }

  std::string refuse(std::vector<NamedTensor> operands, std::vector<NamedAttribute> attributes = {}) {
    const std::vector<uint8_t> before = q_out.memory();
    const std::string message = refusal({"rotary_embedding", std::move(operands), std::move(attributes)});
    EXPECT_EQ(q_out.memory(), before) << "a refused call wrote to q_out";
    return message;
  }
};

TEST_F(RotaryEmbeddingRefusals, Texts) {
  EXPECT_EQ(refuse({{"q", q}, {"k", k}, {"cos_sin", cos_sin}, {"q_out", q_out}}),
            "rotary_embedding: k_out is missing beside k");
  EXPECT_EQ(refuse({{"q", q}, {"cos_sin", cos_sin}, {"q_out", q_out}, {"k_out", k_out}}),
            "rotary_embedding: k_out is given without k");
  EXPECT_EQ(refuse({{"q", q}, {"q_out", q_out}}), "rotary_embedding: cos_sin is missing");

  GuardedTensor odd(DType::kF32, {5, 7});
  EXPECT_EQ(refuse({{"q", q}, {"cos_sin", odd}, {"q_out", q_out}}),
            "rotary_embedding: cos_sin axis 1 is 7; Drot = 7 is no multiple of 2");
  GuardedTensor wide(DType::kF32, {5, 10});
  EXPECT_EQ(refuse({{"q", q}, {"cos_sin", wide}, {"q_out", q_out}}),
            "rotary_embedding: cos_sin axis 1 is 10; Drot = 10 is more than D = 8");
  GuardedTensor few(DType::kF32, {2, 8});
  EXPECT_EQ(refuse({{"q", q}, {"cos_sin", few}, {"q_out", q_out}}),
            "rotary_embedding: cos_sin axis 0 (Lmax) is 2, wanted at least T = 3: without position_ids token t has "
            "position t");

  ids.fill<int32_t>({0, 5, 2});
  EXPECT_EQ(refuse({{"q", q}, {"cos_sin", cos_sin}, {"position_ids", ids}, {"q_out", q_out}}),
            "rotary_embedding: position_ids[1] is 5, wanted 0 to 4 (outside the range)");
  ids.fill<int32_t>({0, 4, -1});
  EXPECT_EQ(refuse({{"q", q}, {"cos_sin", cos_sin}, {"position_ids", ids}, {"q_out", q_out}}),
            "rotary_embedding: position_ids[2] is -1, wanted 0 to 4 (outside the range)");
  GuardedTensor four(DType::kI64, {4});
  EXPECT_EQ(refuse({{"q", q}, {"cos_sin", cos_sin}, {"position_ids", four}, {"q_out", q_out}}),
            "rotary_embedding: position_ids axis 0 (T) is 4, wanted 3 as in q axis 0");

  GuardedTensor other_dtype(DType::kBF16, {3, 2, 8});
  EXPECT_EQ(refuse({{"q", q}, {"k", other_dtype}, {"cos_sin", cos_sin}, {"q_out", q_out}, {"k_out", k_out}}),
            "rotary_embedding: k is bf16, wanted f16 as q");
  GuardedTensor half_table(DType::kF16, {5, 8});
  EXPECT_EQ(refuse({{"q", q}, {"cos_sin", half_table}, {"q_out", q_out}}),
            "rotary_embedding: cos_sin is f16, wanted f32");
  GuardedTensor flat(DType::kF16, {3, 32});
  EXPECT_EQ(refuse({{"q", flat}, {"cos_sin", cos_sin}, {"q_out", q_out}}),
            "rotary_embedding: q has rank 2 [3, 32], wanted [T, Hq, D]");
  EXPECT_EQ(refuse({{"q", q}, {"cos_sin", cos_sin}, {"q_out", k_out}}),
            "rotary_embedding: q_out axis 1 (Hq) is 2, wanted 4 as in q axis 1");
}

TEST_F(RotaryEmbeddingRefusals, OutputsThatOverlapSomethingElse) {
  TensorView shifted = q.view();
  shifted.shape[0] = 2;
  TensorView shifted_out = shifted;
  shifted_out.data = static_cast<char*>(shifted_out.data) + 2 * 32;
  EXPECT_EQ(refusal({"rotary_embedding", {{"q", shifted}, {"cos_sin", cos_sin}, {"q_out", shifted_out}}, {}}),
            "rotary_embedding: q_out is written and shares memory with q");
  GuardedTensor same{DType::kF16, {3, 4, 8}};
  EXPECT_EQ(
      refusal(
          {"rotary_embedding", {{"q", q}, {"k", same}, {"cos_sin", cos_sin}, {"q_out", same}, {"k_out", q_out}}, {}}),
      "rotary_embedding: q_out is written and shares memory with k");
}

}  // namespace
}  // namespace polyop
