// kv_cache_update: both kernels against the formula over ragged sweeps; everything else in the cache keeps its bits.
#include <gtest/gtest.h>

#include "polyop/cpu/thread_pool.h"
#include "tests/cpp/ops/kv_cache_update/kv_cache_case.h"

namespace polyop {
namespace {

using testing::call_kernel;
using testing::GuardedTensor;
using testing::KvCacheCase;
using testing::KvCacheTensors;
using testing::make_kv_cache_tensors;

/// What the cache must hold, from the formula: `before` with each token's row replaced.
GuardedTensor expected_cache(const KvCacheCase& c, GuardedTensor before, GuardedTensor& update, GuardedTensor& scale,
                             KvCacheTensors& tensors) {
  for (size_t b = 0; b < c.new_tokens.size(); ++b) {
    for (int64_t token = 0; token < c.new_tokens[b]; ++token) {
      const int64_t position = (c.has_write_positions ? c.starts[b] : 0) + token;
      const auto sequence = static_cast<int64_t>(b);
      for (int64_t head = 0; head < c.num_kv_heads; ++head) {
        for (int64_t channel = 0; channel < c.head_dim; ++channel) {
          const int64_t packed_row = tensors.update_offsets.at<int32_t>(sequence) + token;
          const int64_t row = c.is_packed ? packed_row : sequence * c.new_tokens[0] + token;
          const int64_t from = (row * c.num_kv_heads + head) * c.head_dim + channel;
          int64_t to = ((sequence * c.num_kv_heads + head) * c.capacity + position) * c.head_dim + channel;
          if (c.is_paged) {
            const int64_t page = tensors.page_table.at<int32_t>({sequence, position / c.page_size});
            to = ((page * c.page_size + position % c.page_size) * c.num_kv_heads + head) * c.head_dim + channel;
          }
          if (c.cache_dtype == c.update_dtype) {
            const auto bytes = static_cast<size_t>(dtype_bytes(c.cache_dtype));
            std::memcpy(&before.at<uint8_t>(to), &update.at<uint8_t>(from), bytes);
            continue;
          }
          const float factor = c.scales == 0 ? 1.0f : scale.at<float>(c.scales == 1 ? 0 : head);
          const float quotient = update.get_float(from) / factor;
          if (c.cache_dtype == DType::kI8) {
            before.at<int8_t>(to) = from_float<int8_t>(quotient);
          } else {
            before.at<F8E4M3>(to) = F8E4M3::from_float(quotient);
          }
        }
      }
    }
  }
  return before;
}

void check_case(const KvCacheCase& c, uint32_t seed) {
  for (const std::string_view kernel : {"cpu_runs", "reference"}) {
    SCOPED_TRACE(std::string(kernel) + " seed " + std::to_string(seed) + ": " + c.text());
    std::mt19937 random(seed);
    KvCacheTensors tensors = make_kv_cache_tensors(c, random);
    const GuardedTensor k_wanted = expected_cache(c, tensors.k_cache, tensors.k, tensors.k_scale, tensors);
    const GuardedTensor v_wanted =
        c.has_values ? expected_cache(c, tensors.v_cache, tensors.v, tensors.v_scale, tensors) : tensors.v_cache;
    const Status status = call_kernel(tensors.call(c), kernel);
    ASSERT_TRUE(status.is_ok()) << status.message();
    EXPECT_TRUE(tensors.k_cache.memory() == k_wanted.memory()) << "k_cache differs";
    EXPECT_TRUE(tensors.v_cache.memory() == v_wanted.memory()) << "v_cache differs";
  }
}

std::vector<KvCacheCase> all_forms(const KvCacheCase& base) {
  std::vector<KvCacheCase> cases;
  for (const bool is_paged : {true, false}) {
    for (const bool is_packed : {true, false}) {
      for (const bool strided : {false, true}) {
        KvCacheCase c = base;
        c.is_paged = is_paged;
        c.is_packed = is_packed;
        c.strided = strided;
        cases.push_back(c);
      }
    }
  }
  return cases;
}

TEST(KvCacheUpdate, Kernels_MatchFormula_PageSizesAndRaggedTokens) {
  uint32_t seed = 0;
  for (const int64_t page_size : {1, 3, 16}) {
    for (KvCacheCase c : all_forms({.page_size = page_size})) {
      c.new_tokens = c.is_packed ? std::vector<int64_t>{5, 0, 1, 17, 0, 48, 2} : std::vector<int64_t>(7, 5);
      c.starts = {0, 7, 47, 31, 48, 0, 14};
      if (!c.is_packed) c.starts = {0, 7, 43, 31, 15, 1, 14};
      check_case(c, ++seed);
    }
  }
}

TEST(KvCacheUpdate, Kernels_MatchFormula_DtypesScalesAndWidths) {
  uint32_t seed = 100;
  for (const auto& [cache_dtype, update_dtype] :
       {std::pair(DType::kF32, DType::kF32), std::pair(DType::kF16, DType::kF16), std::pair(DType::kBF16, DType::kBF16),
        std::pair(DType::kF8E4M3, DType::kF32), std::pair(DType::kF8E4M3, DType::kF16),
        std::pair(DType::kF8E4M3, DType::kBF16), std::pair(DType::kI8, DType::kF32), std::pair(DType::kI8, DType::kF16),
        std::pair(DType::kI8, DType::kBF16)}) {
    for (const int64_t head_dim : {1, 5, 32, 64, 70}) {
      for (KvCacheCase c : all_forms({.page_size = 4, .num_kv_heads = 3, .head_dim = head_dim})) {
        c.cache_dtype = cache_dtype;
        c.update_dtype = update_dtype;
        c.new_tokens = {6, 6};
        c.starts = {5, 42};
        const bool is_quantized = cache_dtype != update_dtype;
        for (const int64_t scales : is_quantized ? std::vector<int64_t>{0, 1, 3} : std::vector<int64_t>{0}) {
          c.scales = scales;
          check_case(c, ++seed);
        }
      }
    }
  }
}

TEST(KvCacheUpdate, Kernels_MatchFormula_OptionalOperandsAbsent) {
  uint32_t seed = 1000;
  for (const bool has_values : {true, false}) {
    for (KvCacheCase c : all_forms({.has_values = has_values, .has_write_positions = false, .num_kv_heads = 1})) {
      c.new_tokens = {20, 20, 20};
      c.starts = {0, 0, 0};
      check_case(c, ++seed);
    }
  }
}

TEST(KvCacheUpdate, Kernels_MatchFormula_NothingToDo) {
  uint32_t seed = 2000;
  for (const KvCacheCase& base : all_forms({})) {
    for (const size_t num_sequences : {0, 3}) {
      KvCacheCase c = base;
      c.new_tokens.assign(num_sequences, 0);
      c.starts.assign(num_sequences, 48);
      check_case(c, ++seed);
    }
    KvCacheCase no_heads = base;
    no_heads.num_kv_heads = 0;
    check_case(no_heads, ++seed);
    KvCacheCase no_room = base;
    no_room.capacity = 0;
    no_room.new_tokens = {0};
    check_case(no_room, ++seed);
  }
}

TEST(KvCacheUpdate, Kernels_MatchFormula_CompletelyFullCache) {
  uint32_t seed = 3000;
  for (KvCacheCase c : all_forms({})) {
    c.new_tokens = {48, 48};
    c.starts = {0, 0};
    check_case(c, ++seed);
    c.new_tokens = {1, 1};
    c.starts = {47, 47};
    check_case(c, ++seed);
  }
}

TEST(KvCacheUpdate, LargeBatch_SameBits_OneToThreeThreads) {
  const int threads_before = cpu::ThreadPool::shared().num_threads();
  for (KvCacheCase c : all_forms({.page_size = 16, .capacity = 320, .num_kv_heads = 2, .head_dim = 64})) {
    c.new_tokens = c.is_packed ? std::vector<int64_t>{300, 0, 1, 310, 3, 0, 211} : std::vector<int64_t>(7, 150);
    c.starts = {20, 320, 319, 10, 1, 0, 109};
    if (!c.is_packed) c.starts = {0, 1, 2, 24, 170, 0, 109};
    for (const int threads : {1, 2, 3}) {
      cpu::ThreadPool::shared().set_num_threads(threads);
      check_case(c, 4000);
    }
  }
  cpu::ThreadPool::shared().set_num_threads(threads_before);
}

// Page ids and offsets past what a call needs are poison in every case above; here a sequence without tokens may have a
// page table of nothing but poison, and the pages before the first written one need not exist.
TEST(KvCacheUpdate, PageIdsOfUnwrittenPages_AreNeverRead) {
  KvCacheCase c;
  c.new_tokens = {0, 2};
  c.starts = {13, 31};  // row 1 spans columns 1 and 2; its column 0 is poison
  check_case(c, 5000);
}

}  // namespace
}  // namespace polyop
