// qk_norm_rope_append: without a norm, the bits of rotary_embedding and kv_cache_update; with one, the README's bound.
#include <gtest/gtest.h>

#include "polyop/cpu/thread_pool.h"
#include "tests/cpp/ops/qk_norm_rope_append/append_case.h"
#include "tests/cpp/testing/simd_targets.h"

namespace polyop {
namespace {

using testing::AppendCase;
using testing::AppendTensors;
using testing::Call;
using testing::call_kernel;
using testing::GuardedTensor;
using testing::KvCacheCase;
using testing::make_append_tensors;

constexpr std::string_view kKernels[] = {"cpu_tokens", "reference"};

/// The first `rows` rows of axis 0.
TensorView first_rows(GuardedTensor& tensor, int64_t rows) {
  TensorView view = tensor.view();
  view.shape[0] = rows;
  return view;
}

int64_t num_tokens(const AppendCase& c) {
  return std::accumulate(c.cache.new_tokens.begin(), c.cache.new_tokens.end(), int64_t{0});
}

/// What one call must do, by two: rotate q into q_out and k into a copy, then append that copy.
void run_apart(const AppendCase& c, AppendTensors& tensors) {
  const int64_t tokens = num_tokens(c);
  GuardedTensor ids = tensors.position_ids;
  if (!c.has_position_ids) {
    for (size_t b = 0; b < c.cache.new_tokens.size(); ++b) {
      for (int64_t t = 0; t < c.cache.new_tokens[b]; ++t) {
        const int64_t start = c.cache.has_write_positions ? c.cache.starts[b] : 0;
        ids.at<int32_t>(tensors.kv.update_offsets.at<int32_t>(static_cast<int64_t>(b)) + t) =
            static_cast<int32_t>(start + t);
      }
    }
  }
  GuardedTensor k = tensors.kv.k;
  ASSERT_TRUE(call_kernel({"rotary_embedding",
                           {{"q", first_rows(tensors.q, tokens)},
                            {"k", first_rows(k, tokens)},
                            {"cos_sin", tensors.cos_sin},
                            {"position_ids", first_rows(ids, tokens)},
                            {"q_out", first_rows(c.in_place ? tensors.q : tensors.q_out, tokens)},
                            {"k_out", first_rows(k, tokens)}},
                           {{"interleaved", AttributeValue::of_bool(c.interleaved)}}},
                          "cpu_rows")
                  .is_ok());
  Call append = tensors.kv.call(c.cache);
  std::erase_if(append.operands, [](const NamedTensor& operand) { return operand.name == "k"; });
  append.operands.push_back({"k", k});
  ASSERT_TRUE(call_kernel(append, "cpu_runs").is_ok());
}

void expect_same_bits_as_apart(const AppendCase& c, uint32_t seed) {
  SCOPED_TRACE("seed " + std::to_string(seed) + ": " + c.text());
  std::mt19937 random(seed);
  AppendTensors got = make_append_tensors(c, random);
  AppendTensors wanted = got;
  run_apart(c, wanted);
  const Status status = call_kernel(got.call(c), "cpu_tokens");
  ASSERT_TRUE(status.is_ok()) << status.message();
  EXPECT_TRUE(got.kv.k_cache.memory() == wanted.kv.k_cache.memory()) << "k_cache differs";
  EXPECT_TRUE(got.kv.v_cache.memory() == wanted.kv.v_cache.memory()) << "v_cache differs";
  EXPECT_TRUE(got.q_out.memory() == wanted.q_out.memory()) << "q_out differs";
  EXPECT_TRUE(got.q.memory() == wanted.q.memory()) << "q differs";
  EXPECT_TRUE(got.kv.k.memory() == wanted.kv.k.memory()) << "k was written";
}

std::vector<AppendCase> all_forms(const AppendCase& base) {
  std::vector<AppendCase> cases;
  for (int bits = 0; bits < 32; ++bits) {
    AppendCase c = base;
    c.cache.is_paged = (bits & 1) != 0;
    c.cache.strided = (bits & 2) != 0;
    c.interleaved = (bits & 4) != 0;
    c.has_position_ids = (bits & 8) != 0;
    c.in_place = (bits & 16) != 0;
    cases.push_back(c);
  }
  return cases;
}

TEST(QkNormRopeAppend_Cpu, WithoutNorm_BitsOfTheTwoOperators_PageSizesAndRaggedTokens) {
  uint32_t seed = 0;
  for (const int64_t page_size : {1, 3, 16}) {
    for (AppendCase c : all_forms({.cache = {.page_size = page_size}})) {
      c.cache.new_tokens = {5, 0, 1, 17, 0, 48, 2};
      c.cache.starts = {0, 7, 47, 31, 48, 0, 14};
      expect_same_bits_as_apart(c, ++seed);
    }
  }
}

TEST(QkNormRopeAppend_Cpu, WithoutNorm_BitsOfTheTwoOperators_DtypesScalesAndWidths) {
  uint32_t seed = 100;
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    for (const DType cache_dtype : {dtype, DType::kF8E4M3, DType::kI8}) {
      for (const auto& [head_dim, rotary_dim] : {std::pair{1, 0}, {5, 2}, {64, 64}, {70, 38}, {72, 72}, {128, 32}}) {
        for (AppendCase c : all_forms({.cache = {.page_size = 4, .num_kv_heads = 3}})) {
          c.cache.head_dim = head_dim;
          c.rotary_dim = rotary_dim;
          c.cache.update_dtype = dtype;
          c.cache.cache_dtype = cache_dtype;
          c.cache.new_tokens = {6, 6};
          c.cache.starts = {5, 42};
          const bool is_quantized = cache_dtype != dtype;
          for (const int64_t scales : is_quantized ? std::vector<int64_t>{0, 1, 3} : std::vector<int64_t>{0}) {
            c.cache.scales = scales;
            expect_same_bits_as_apart(c, ++seed);
          }
        }
      }
    }
  }
}

TEST(QkNormRopeAppend_Cpu, WithoutNorm_BitsOfTheTwoOperators_NothingToDo) {
  uint32_t seed = 2000;
  for (const AppendCase& base : all_forms({})) {
    for (const size_t num_sequences : {0, 3}) {
      AppendCase c = base;
      c.cache.new_tokens.assign(num_sequences, 0);
      c.cache.starts.assign(num_sequences, 48);
      expect_same_bits_as_apart(c, ++seed);
    }
    AppendCase no_queries = base;
    no_queries.num_query_heads = 0;
    expect_same_bits_as_apart(no_queries, ++seed);
    AppendCase no_heads = base;
    no_heads.cache.num_kv_heads = 0;
    expect_same_bits_as_apart(no_heads, ++seed);
  }
}

TEST(QkNormRopeAppend_Cpu, WithoutNorm_BitsOfTheTwoOperators_EveryTarget) {
  testing::on_every_simd_target([] {
    uint32_t seed = 3000;
    for (const DType cache_dtype : {DType::kF16, DType::kF8E4M3}) {
      for (AppendCase c : all_forms({.cache = {.head_dim = 70}, .rotary_dim = 46})) {
        c.cache.cache_dtype = cache_dtype;
        expect_same_bits_as_apart(c, ++seed);
      }
    }
  });
}

TEST(QkNormRopeAppend_Cpu, LargeBatch_SameBits_OneToThreeThreads) {
  const int threads_before = cpu::ThreadPool::shared().num_threads();
  AppendCase c{.cache = {.page_size = 16, .capacity = 320, .head_dim = 64}, .rotary_dim = 64};
  c.cache.new_tokens = {300, 0, 1, 310, 3, 0, 211};
  c.cache.starts = {20, 320, 319, 10, 1, 0, 109};
  for (const int threads : {1, 2, 3}) {
    cpu::ThreadPool::shared().set_num_threads(threads);
    expect_same_bits_as_apart(c, 4000);
  }
  cpu::ThreadPool::shared().set_num_threads(threads_before);
}

// ---- norm -----------------------------------------------------------------------------------------------------------

/// A channel after norm and rotation in double, and the sum A of the README's bound.
struct Exact {
  double value;
  double magnitude;
};

/// All channels of row `row` [D] of x.
std::vector<Exact> exact_head(const AppendCase& c, GuardedTensor& cos_sin, GuardedTensor& x, GuardedTensor& weight,
                              int64_t row, int64_t position) {
  const int64_t head_dim = c.cache.head_dim;
  std::vector<double> normed;
  double sum = 0.0;
  for (int64_t i = 0; i < head_dim; ++i) {
    normed.push_back(x.get_float(row * head_dim + i));
    sum += normed.back() * normed.back();
  }
  const double factor = 1.0 / std::sqrt(sum / static_cast<double>(head_dim) + AppendTensors::kEpsilon);
  for (int64_t i = 0; i < head_dim; ++i) normed[static_cast<size_t>(i)] *= factor * double{weight.get_float(i)};
  std::vector<Exact> result;
  const int64_t half = c.rotary_dim / 2;
  for (int64_t i = 0; i < head_dim; ++i) {
    const double own = normed[static_cast<size_t>(i)];
    if (i >= c.rotary_dim) {
      result.push_back({own, std::abs(own)});
      continue;
    }
    const bool is_first = c.interleaved ? i % 2 == 0 : i < half;
    const int64_t pair = c.interleaved ? i / 2 : i % half;
    const int64_t partner = c.interleaved ? i ^ 1 : (i + half) % c.rotary_dim;
    const double a = own * double{cos_sin.at<float>({position, pair})};
    const double b = normed[static_cast<size_t>(partner)] * double{cos_sin.at<float>({position, pair + half})};
    result.push_back({is_first ? a - b : a + b, std::abs(a) + std::abs(b)});
  }
  return result;
}

/// The bound of the README: u_out |exact| + (D / 2 + 9) u_32 A + least step.
double bound_of(const AppendCase& c, const Exact& exact) {
  const DType dtype = c.cache.update_dtype;
  const double u_out = dtype == DType::kF32 ? 0.0 : dtype == DType::kF16 ? 0x1p-11 : 0x1p-8;
  const double least_step = dtype == DType::kF16 ? 0x1p-25 : 0x1p-133;
  const double terms = static_cast<double>(c.cache.head_dim) / 2 + 9;
  return u_out * std::abs(exact.value) + terms * 0x1p-24 * exact.magnitude + least_step;
}

void expect_within_bound(const AppendCase& c, std::string_view kernel, uint32_t seed) {
  SCOPED_TRACE(std::string(kernel) + " seed " + std::to_string(seed) + ": " + c.text());
  std::mt19937 random(seed);
  AppendTensors tensors = make_append_tensors(c, random);
  tensors.q.fill_floats(random, 3.0f);
  tensors.kv.k.fill_floats(random, 3.0f);
  GuardedTensor q = tensors.q;
  const Status status = call_kernel(tensors.call(c), kernel);
  ASSERT_TRUE(status.is_ok()) << status.message();
  GuardedTensor& q_out = c.in_place ? tensors.q : tensors.q_out;
  EXPECT_TRUE(q_out.guards_intact());
  EXPECT_TRUE(tensors.kv.k_cache.guards_intact());
  const int64_t head_dim = c.cache.head_dim;
  double worst = 0.0;
  const auto check = [&](GuardedTensor& got, int64_t got_row, const std::vector<Exact>& wanted) {
    for (int64_t i = 0; i < head_dim; ++i) {
      const Exact& exact = wanted[static_cast<size_t>(i)];
      worst =
          std::max(worst, std::abs(double{got.get_float(got_row * head_dim + i)} - exact.value) / bound_of(c, exact));
    }
  };
  for (size_t b = 0; b < c.cache.new_tokens.size(); ++b) {
    const auto sequence = static_cast<int64_t>(b);
    for (int64_t t = 0; t < c.cache.new_tokens[b]; ++t) {
      const int64_t token = tensors.kv.update_offsets.at<int32_t>(sequence) + t;
      const int64_t cache_position = c.cache.starts[b] + t;
      const int64_t position = c.has_position_ids ? tensors.position_ids.at<int32_t>(token) : cache_position;
      const int64_t page = c.cache.is_paged
                               ? tensors.kv.page_table.at<int32_t>({sequence, cache_position / c.cache.page_size})
                               : sequence;
      for (int64_t head = 0; head < c.num_query_heads; ++head) {
        const int64_t row = token * c.num_query_heads + head;
        check(q_out, row, exact_head(c, tensors.cos_sin, q, tensors.q_norm_weight, row, position));
      }
      for (int64_t head = 0; head < c.cache.num_kv_heads; ++head) {
        const int64_t row = token * c.cache.num_kv_heads + head;
        const int64_t at =
            c.cache.is_paged
                ? ((page * c.cache.page_size + cache_position % c.cache.page_size) * c.cache.num_kv_heads + head)
                : ((page * c.cache.num_kv_heads + head) * c.cache.capacity + cache_position);
        check(tensors.kv.k_cache, at,
              exact_head(c, tensors.cos_sin, tensors.kv.k, tensors.k_norm_weight, row, position));
      }
    }
  }
  EXPECT_LE(worst, 1.0) << "error over bound";
}

TEST(QkNormRopeAppend_Cpu, WithNorm_StaysWithinBound) {
  uint32_t seed = 5000;
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    for (const DType weight_dtype : {DType::kF32, dtype}) {
      for (const auto& [head_dim, rotary_dim] : {std::pair{1, 0}, {2, 2}, {19, 6}, {64, 64}, {70, 38}, {128, 128}}) {
        for (AppendCase c : all_forms({.cache = {}, .has_norm = true, .weight_dtype = weight_dtype})) {
          c.cache.head_dim = head_dim;
          c.rotary_dim = rotary_dim;
          c.cache.cache_dtype = c.cache.update_dtype = dtype;
          c.cache.new_tokens = {3, 0, 2};
          c.cache.starts = {14, 3, 46};
          for (const std::string_view kernel : kKernels) expect_within_bound(c, kernel, seed);
          ++seed;
        }
      }
    }
  }
}

TEST(QkNormRopeAppend_Cpu, WithNorm_StaysWithinBound_MoreHeadsThanAreNormedAtOnce) {
  for (AppendCase c : all_forms({.cache = {.num_kv_heads = 17}, .num_query_heads = 34, .has_norm = true})) {
    for (const std::string_view kernel : kKernels) expect_within_bound(c, kernel, 5900);
  }
}

TEST(QkNormRopeAppend_Cpu, WithNorm_TokenHasTheSameBits_AloneAndInABatch) {
  for (const DType cache_dtype : {DType::kBF16, DType::kI8}) {
    AppendCase c{.cache = {.page_size = 4, .head_dim = 72}, .rotary_dim = 44, .has_norm = true};
    c.cache.update_dtype = DType::kBF16;
    c.cache.cache_dtype = cache_dtype;
    c.cache.new_tokens = {9, 1, 5};
    c.cache.starts = {0, 30, 7};
    std::mt19937 random(6000);
    AppendTensors batch = make_append_tensors(c, random);
    batch.q.fill_floats(random, 1.0f);
    batch.kv.k.fill_floats(random, 1.0f);
    AppendTensors alone = batch;
    ASSERT_TRUE(call_kernel(batch.call(c)).is_ok());
    // Every token as a batch of one: its own sequence, its own row of the page table.
    for (int64_t b = 0; b < 3; ++b) {
      for (int64_t t = 0; t < c.cache.new_tokens[static_cast<size_t>(b)]; ++t) {
        const int64_t token = alone.kv.update_offsets.at<int32_t>(b) + t;
        GuardedTensor offsets(DType::kI32, {2});
        offsets.fill<int32_t>({0, 1});
        GuardedTensor start(DType::kI32, {1});
        start.at<int32_t>(0) = static_cast<int32_t>(c.cache.starts[static_cast<size_t>(b)] + t);
        Call call = alone.call(c);
        for (NamedTensor& operand : call.operands) {
          const bool is_token = operand.name == "q" || operand.name == "k" || operand.name == "v" ||
                                operand.name == "q_out" || operand.name == "position_ids";
          if (!is_token && operand.name != "page_table") continue;
          operand.tensor.shape[0] = 1;
          operand.tensor.data = static_cast<char*>(operand.tensor.data) +
                                (is_token ? token : b) * operand.tensor.strides[0] * dtype_bytes(operand.tensor.dtype);
        }
        std::erase_if(call.operands, [](const NamedTensor& operand) {
          return operand.name == "update_offsets" || operand.name == "write_positions";
        });
        call.operands.insert(call.operands.end(), {{"update_offsets", offsets}, {"write_positions", start}});
        const Status status = call_kernel(call);
        ASSERT_TRUE(status.is_ok()) << status.message();
      }
    }
    EXPECT_TRUE(alone.q_out.memory() == batch.q_out.memory());
    EXPECT_TRUE(alone.kv.k_cache.memory() == batch.kv.k_cache.memory());
    EXPECT_TRUE(alone.kv.v_cache.memory() == batch.kv.v_cache.memory());
  }
}

// ---- tokens without a slot ------------------------------------------------------------------------------------------

TEST(QkNormRopeAppend_Cpu, TokensWithoutASlot_LeaveEverythingAsItIs) {
  for (const std::string_view kernel : kKernels) {
    for (AppendCase c : all_forms({.cache = {}, .has_norm = true})) {
      if (!c.has_position_ids) continue;
      c.cache.new_tokens = {7, 4};
      c.cache.starts = {13, 0};
      SCOPED_TRACE(std::string(kernel) + ": " + c.text());
      std::mt19937 random(7000);
      AppendTensors tensors = make_append_tensors(c, random);
      AppendTensors wanted = tensors;
      ASSERT_TRUE(call_kernel(wanted.call(c), kernel).is_ok());
      const AppendTensors before = tensors;
      const std::vector<int64_t> left_out = {0, 2, 3, 6, 7, 10};
      for (const int64_t token : left_out) tensors.position_ids.at<int32_t>(token) = -1;
      ASSERT_TRUE(call_kernel(tensors.call(c), kernel).is_ok());
      // What a left-out token would have written is as before; everything else as without left-out tokens.
      const auto expect_rows = [&](GuardedTensor got, GuardedTensor full, GuardedTensor old, auto&& is_left_out) {
        const TensorView view = got.view();
        const int64_t bytes = dtype_bytes(view.dtype);
        for (int64_t i = 0; i < got.size(); ++i) {
          GuardedTensor& source = is_left_out(i) ? old : full;
          ASSERT_EQ(std::memcmp(&got.at<uint8_t>(i), &source.at<uint8_t>(i), static_cast<size_t>(bytes)), 0)
              << "element " << i;
        }
      };
      const auto is_out = [&](int64_t token) {
        return token >= 11 || std::find(left_out.begin(), left_out.end(), token) != left_out.end();
      };
      const int64_t q_columns = c.num_query_heads * c.cache.head_dim;
      expect_rows(c.in_place ? tensors.q : tensors.q_out, c.in_place ? wanted.q : wanted.q_out,
                  c.in_place ? before.q : before.q_out, [&](int64_t i) { return is_out(i / q_columns); });
      const auto token_at = [&](int64_t i) {  // the token whose row of the cache element i belongs to, or one left out
        const int64_t heads = c.cache.num_kv_heads;
        const int64_t head_dim = c.cache.head_dim;
        for (int64_t token = 0; token < 11; ++token) {
          const int64_t b = token < 7 ? 0 : 1;
          const int64_t position = token < 7 ? 13 + token : token - 7;
          if (c.cache.is_paged) {
            const int64_t page = tensors.kv.page_table.at<int32_t>({b, position / c.cache.page_size});
            if (i / (heads * head_dim) == page * c.cache.page_size + position % c.cache.page_size) return token;
          } else if (i / (heads * c.cache.capacity * head_dim) == b && i / head_dim % c.cache.capacity == position) {
            return token;
          }
        }
        return int64_t{0};
      };
      expect_rows(tensors.kv.k_cache, wanted.kv.k_cache, before.kv.k_cache,
                  [&](int64_t i) { return is_out(token_at(i)); });
      expect_rows(tensors.kv.v_cache, wanted.kv.v_cache, before.kv.v_cache,
                  [&](int64_t i) { return is_out(token_at(i)); });
    }
  }
}

}  // namespace
}  // namespace polyop
