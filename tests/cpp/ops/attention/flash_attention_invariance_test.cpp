// The result of a sequence has the same bits whatever else is in the batch, wherever its pages lie, however large they
// are, with any strides, any number of threads, and whether a row comes in a prefill, a chunk or a decode step.
#include "polyop/cpu/thread_pool.h"
#include "tests/cpp/ops/attention/attention_case.h"

namespace polyop::testing {
namespace {

constexpr int64_t kHeads = 6;
constexpr int64_t kHeadDim = 20;

AttentionCase case_of(std::vector<SequenceSpec> sequences, DType dtype = key_dtypes().front()) {
  AttentionCase spec{.sequences = std::move(sequences), .num_query_heads = kHeads, .num_kv_heads = 2};
  spec.head_dim = kHeadDim;
  spec.dtype = dtype;
  return spec;
}

AttentionResult run(const AttentionCase& spec) { return AttentionMemory(spec, spec.dtype).run_fast(); }

// Rows [begin, end) of a result.
AttentionResult rows(const AttentionResult& all, int64_t begin, int64_t end) {
  const auto cut = [&](const std::vector<float>& from, int64_t width) {
    return std::vector<float>(from.begin() + begin * width, from.begin() + end * width);
  };
  return {cut(all.out, kHeads * kHeadDim), cut(all.lse, kHeads)};
}

void expect_same(const AttentionResult& got, const AttentionResult& wanted, const std::string& what) {
  EXPECT_TRUE(same_bits(got.out, wanted.out)) << what;
  EXPECT_TRUE(same_bits(got.lse, wanted.lse)) << what;
}

// Rows on both sides of a register tile and of a task, lengths of one and of several chunks.
const std::vector<SequenceSpec> kBatch = {{33, 33, 1}, {1, 700, 2}, {0, 0, 3}, {70, 600, 4}, {1, 1, 5}, {7, 1300, 6}};

TEST(AttentionInvariance_Cpu, BatchNeighbours) {
  on_every_flash_kernel([] {
    for (DType dtype : key_dtypes()) {
      const AttentionResult batch = run(case_of(kBatch, dtype));
      int64_t first_row = 0;
      for (const SequenceSpec& s : kBatch) {
        expect_same(run(case_of({s}, dtype)), rows(batch, first_row, first_row + s.query_length), std::to_string(s.id));
        first_row += s.query_length;
      }
    }
  });
}

TEST(AttentionInvariance_Cpu, PagesStridesAndForms) {
  on_every_flash_kernel([] {
    const AttentionResult wanted = run(case_of(kBatch));
    for (int64_t page : {1, 3, 16, 128}) {
      AttentionCase spec = case_of(kBatch);
      spec.page_size = page;
      spec.page_seed = static_cast<uint64_t>(page);
      spec.gap = page == 3 ? 5 : 0;
      expect_same(run(spec), wanted, spec.to_string());
    }
    for (AttentionKvForm form : {AttentionKvForm::kPacked, AttentionKvForm::kPadded}) {
      AttentionCase spec = case_of(kBatch);
      spec.kv_form = form;
      expect_same(run(spec), wanted, spec.to_string());
    }
  });
}

TEST(AttentionInvariance_Cpu, Threads) {
  cpu::ThreadPool& pool = cpu::ThreadPool::shared();
  const int before = pool.num_threads();
  on_every_flash_kernel([&] {
    for (const auto& batch :
         {kBatch, std::vector<SequenceSpec>{{1, 1300, 6}}, std::vector<SequenceSpec>{{7, 1300, 6}}}) {
      pool.set_num_threads(1);
      const AttentionResult wanted = run(case_of(batch));
      for (int threads : {2, 3}) {
        pool.set_num_threads(threads);
        for (int round = 0; round < 3; ++round) expect_same(run(case_of(batch)), wanted, std::to_string(threads));
      }
    }
  });
  pool.set_num_threads(before);
}

TEST(AttentionInvariance_Cpu, RowKernel_Threads) {
  cpu::ThreadPool& pool = cpu::ThreadPool::shared();
  const int before = pool.num_threads();
  const auto run_rows = [](DType dtype) {
    return AttentionMemory(case_of(kBatch, dtype), dtype).run(cpu::row_attention, cpu::row_attention_workspace_bytes);
  };
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    pool.set_num_threads(1);
    const AttentionResult wanted = run_rows(dtype);
    for (int threads : {2, 3}) {
      pool.set_num_threads(threads);
      expect_same(run_rows(dtype), wanted, std::to_string(threads));
    }
  }
  pool.set_num_threads(before);
}

TEST(AttentionInvariance_Cpu, PrefillChunksAndDecodeStepsAgree) {
  on_every_flash_kernel([] {
    constexpr int64_t kLength = 600;
    const AttentionResult whole = run(case_of({{kLength, kLength, 1}}));
    for (int64_t end : {1, 17, 64, 65, 512, 513, 600}) {
      expect_same(run(case_of({{1, end, 1}})), rows(whole, end - 1, end), "decode at " + std::to_string(end));
    }
    for (const auto& [begin, end] : {std::pair{0, 100}, {100, 163}, {163, 600}}) {
      expect_same(run(case_of({{end - begin, end, 1}})), rows(whole, begin, end),
                  "chunk from " + std::to_string(begin));
    }
  });
}

TEST(AttentionInvariance_Cpu, SlidingWindowDoesNotDependOnTheCut) {
  on_every_flash_kernel([] {
    AttentionCase whole = case_of({{600, 600, 1}});
    whole.window = 150;
    const AttentionResult wanted = run(whole);
    for (int64_t end : {100, 333, 600}) {
      AttentionCase step = case_of({{1, end, 1}});
      step.window = 150;
      expect_same(run(step), rows(wanted, end - 1, end), std::to_string(end));
    }
  });
}

}  // namespace
}  // namespace polyop::testing
