// The flash kernels against the reference: flash_attention on every SIMD target of this processor, and amx_attention.
#include <limits>

#include "tests/cpp/ops/attention/attention_case.h"

namespace polyop::testing {
namespace {

// Prefill, chunk, decode and empty sequences around the page and tile borders, a completely full cache among them.
std::vector<SequenceSpec> mixed_batch(int64_t page) {
  return {{5, 5, 1}, {0, 0, 2}, {1, page, 3},     {3, page + 1, 4}, {1, page - 1, 5}, {0, 7, 6},
          {4, 0, 7}, {1, 1, 8}, {2, 4 * page, 9}, {9, 70, 10},      {1, 129, 11}};
}

TEST(Attention_Cpu, Flash_MatchesReference_HeadRatios) {
  on_every_flash_kernel([] {
    for (const auto& [hq, hkv] : {std::pair{1, 1}, {4, 2}, {9, 3}, {5, 1}, {14, 2}, {16, 1}, {6, 6}}) {
      for (DType dtype : key_dtypes()) {
        AttentionCase spec{.sequences = mixed_batch(16), .num_query_heads = hq, .num_kv_heads = hkv};
        spec.head_dim = 32;
        spec.dtype = dtype;
        expect_matches_reference(spec);
      }
    }
  });
}

TEST(Attention_Cpu, Flash_MatchesReference_HeadSizes) {
  on_every_flash_kernel([] {
    for (int64_t head_dim : {1, 2, 8, 63, 64, 80, 128, 256, 512}) {
      for (DType dtype : key_dtypes()) {
        AttentionCase spec{.sequences = {{7, 7, 1}, {1, 66, 2}, {3, 20, 3}}, .num_query_heads = 3, .num_kv_heads = 1};
        spec.head_dim = head_dim;
        spec.dtype = dtype;
        expect_matches_reference(spec);
      }
    }
  });
}

TEST(Attention_Cpu, Flash_MatchesReference_ValueHeadSizeDiffers) {
  on_every_flash_kernel([] {
    for (const auto& [dk, dv] : {std::pair{192, 128}, {16, 100}, {5, 3}}) {
      AttentionCase spec{.sequences = {{7, 90, 1}, {1, 66, 2}}, .dtype = key_dtypes().front()};
      spec.head_dim = dk;
      spec.value_head_dim = dv;
      expect_matches_reference(spec);
    }
  });
}

TEST(Attention_Cpu, Flash_MatchesReference_PageSizes) {
  on_every_flash_kernel([] {
    for (int64_t page : {1, 3, 16, 128}) {
      for (int64_t gap : {0, 5}) {
        AttentionCase spec{.sequences = mixed_batch(page), .num_query_heads = 6, .num_kv_heads = 2};
        spec.head_dim = gap == 0 ? 32 : 20;  // 32: tiles may read the cache itself
        spec.dtype = key_dtypes().front();
        spec.page_size = page;
        spec.gap = gap;
        spec.rows_without_sequence = 3;
        expect_matches_reference(spec);
      }
    }
  });
}

TEST(Attention_Cpu, Flash_MatchesReference_FullCache) {
  on_every_flash_kernel([] {
    AttentionCase spec{.sequences = {{1, 64, 1}, {16, 64, 2}}, .dtype = key_dtypes().front()};
    spec.page_size = 16;
    spec.spare_pages = 0;
    spec.table_slack = 0;
    expect_matches_reference(spec);
  });
}

TEST(Attention_Cpu, Flash_MatchesReference_FormsMasksWindowsSinks) {
  on_every_flash_kernel([] {
    for (AttentionKvForm form : {AttentionKvForm::kPaged, AttentionKvForm::kPacked, AttentionKvForm::kPadded}) {
      for (AttentionCausal causal :
           {AttentionCausal::kNone, AttentionCausal::kUpperLeft, AttentionCausal::kLowerRight}) {
        for (int64_t window : {-1, 0, 1, 5, 40}) {
          AttentionCase spec{.sequences = {{30, 30, 1}, {12, 75, 2}, {9, 4, 3}, {1, 100, 4}}, .num_query_heads = 6};
          spec.head_dim = 16;
          spec.dtype = key_dtypes().front();
          spec.kv_form = form;
          spec.causal = causal;
          spec.window = window;
          spec.sinks = window == 5 || window == -1;
          expect_matches_reference(spec);
          spec.query_form = AttentionQueryForm::kPadded;
          expect_matches_reference(spec);
        }
      }
    }
  });
}

TEST(Attention_Cpu, Flash_MatchesReference_ManyChunks) {
  on_every_flash_kernel([] {
    for (int64_t window : {-1, 600}) {
      AttentionCase spec{.sequences = {{1, 1700, 1}, {40, 1100, 2}, {1, 512, 3}, {1, 513, 4}}, .num_query_heads = 3};
      spec.num_kv_heads = 1;
      spec.head_dim = 24;
      spec.dtype = key_dtypes().front();
      spec.window = window;
      expect_matches_reference(spec);
    }
  });
}

TEST(Attention_Cpu, Flash_MatchesReference_LongPrefill) {
  on_every_flash_kernel([] {
    AttentionCase spec{.sequences = {{300, 300, 1}, {100, 620, 2}}, .num_query_heads = 9, .num_kv_heads = 3};
    spec.head_dim = 64;
    spec.dtype = key_dtypes().back();
    expect_matches_reference(spec);
  });
}

TEST(Attention_Cpu, Flash_EmptyBatch) {
  on_every_flash_kernel([] {
    AttentionCase spec{.sequences = {}, .dtype = key_dtypes().front()};
    spec.rows_without_sequence = 2;
    AttentionMemory memory(spec, spec.dtype);
    const AttentionResult result = memory.run_fast();
    for (float x : result.out) EXPECT_EQ(x, 0.0f);
    for (float x : result.lse) EXPECT_EQ(x, -std::numeric_limits<float>::infinity());
    spec.rows_without_sequence = 0;
    EXPECT_TRUE(AttentionMemory(spec, spec.dtype).run_fast().out.empty());
  });
}

TEST(Attention_Cpu, Flash_WithoutLseWritesTheSameOutput) {
  on_every_flash_kernel([] {
    const AttentionCase spec{.sequences = {{5, 5, 1}, {1, 40, 2}}, .dtype = key_dtypes().front()};
    AttentionMemory with(spec, spec.dtype);
    AttentionMemory without(spec, spec.dtype);
    without.problem.lse = {};
    EXPECT_TRUE(same_bits(with.run_fast().out, without.run_fast().out));
  });
}

// One visible key: its weight is exactly one.
TEST(Attention_Cpu, Flash_SingleKeyGivesItsValueExactly) {
  on_every_flash_kernel([] {
    const AttentionCase spec{.sequences = {{1, 1, 1}}, .dtype = key_dtypes().front()};
    AttentionMemory memory(spec, spec.dtype);
    const AttentionResult result = memory.run_fast();
    for (int64_t h = 0; h < 4; ++h) {
      for (int64_t d = 0; d < 64; ++d) {
        EXPECT_EQ(result.out[h * 64 + d],
                  element_at(memory.key_element(memory.problem.v, 0, 0, h / 2, d), spec.dtype, 0));
      }
    }
  });
}

// NaN and infinity in keys and values that a row must not see stay out of it; the bits are those of finite ones.
TEST(Attention_Cpu, Flash_FutureKeysMayHoldAnything) {
  constexpr int64_t kLength = 70;
  struct Variant {
    int64_t rows;  // at the end of the keys: many, or few enough for a decode step
    int64_t first_poisoned;
    int64_t head_dim;
    bool in_keys;  // or in values alone
  };
  on_every_flash_kernel([] {
    for (float poison : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
      for (const Variant& variant : {Variant{70, 37, 24, true}, Variant{70, 37, 24, false}, Variant{5, 67, 96, true},
                                     Variant{5, 67, 96, false}}) {
        for (int64_t query_heads : {2, 6}) {
          AttentionCase spec{.sequences = {{variant.rows, kLength, 1}}, .num_query_heads = query_heads};
          spec.head_dim = variant.head_dim;
          spec.dtype = key_dtypes().front();
          AttentionMemory clean(spec, spec.dtype);
          const AttentionResult wanted = clean.run_fast();
          AttentionMemory poisoned(spec, spec.dtype);
          for (int64_t key = variant.first_poisoned; key < kLength; ++key) {
            for (int64_t h = 0; h < 2; ++h) {
              for (int64_t d = 0; d < spec.head_dim; ++d) {
                if (variant.in_keys) {
                  set_element(poisoned.key_element(poisoned.problem.k, 0, key, h, d), spec.dtype, poison);
                }
                set_element(poisoned.key_element(poisoned.problem.v, 0, key, h, d), spec.dtype, poison);
              }
            }
          }
          AttentionResult got = poisoned.run_fast();
          const int64_t clean_rows = variant.first_poisoned - (kLength - variant.rows);
          const auto rows_end = static_cast<size_t>(clean_rows * query_heads * spec.head_dim);
          // The row of the first poisoned key sees it, in every column.
          for (int64_t d = 0; d < spec.head_dim; ++d) EXPECT_FALSE(std::isfinite(got.out[rows_end + d])) << d;
          got.out.resize(rows_end);
          std::vector<float> expected(wanted.out.begin(), wanted.out.begin() + static_cast<std::ptrdiff_t>(rows_end));
          EXPECT_TRUE(same_bits(got.out, expected));
        }
      }
    }
  });
}

// A NaN in one sequence or row stays there.
TEST(Attention_Cpu, Flash_NanStaysInItsRow) {
  on_every_flash_kernel([] {
    const AttentionCase spec{.sequences = {{4, 30, 1}, {2, 10, 2}}, .dtype = key_dtypes().front()};
    AttentionMemory memory(spec, spec.dtype);
    set_element(memory.problem.row_address(memory.problem.q, 0, 1, 2), spec.dtype,
                std::numeric_limits<float>::quiet_NaN());
    const AttentionResult result = memory.run_fast();
    for (size_t i = 0; i < result.out.size(); ++i) {
      const bool spoiled = i / 64 == 1 * 4 + 2;
      EXPECT_EQ(std::isnan(result.out[i]), spoiled) << i;
    }
  });
}

TEST(Attention_Cpu, Flash_SaysWhatItRefuses) {
  const AttentionCase spec{.sequences = {{1, 1, 1}}};
  AttentionMemory memory(spec, DType::kF32);
  const auto refusal = [&](auto change) {
    AttentionProblem problem = memory.problem;
    change(problem);
    const Status status = cpu::supports_flash_attention(problem);
    EXPECT_EQ(status.code(), StatusCode::kUnsupported);
    return status.message();
  };
  const int32_t word = 0;
  EXPECT_EQ(refusal([](auto& p) { p.normalization = AttentionNormalization::kNone; }),
            "normalization is none, wanted softmax");
  EXPECT_EQ(refusal([](auto& p) { p.weight_quantization = AttentionWeightQuantization::kInt8; }),
            "weights are quantized");
  EXPECT_EQ(refusal([&](auto& p) { p.mask.data = &word; }), "it takes no dense mask");
  EXPECT_EQ(refusal([&](auto& p) { p.tree_mask.words = &word; }), "it takes no tree_mask");
  EXPECT_EQ(refusal([](auto& p) { p.q.dtype = DType::kF8E4M3; }), "q is f8e4m3, wanted f32, f16 or bf16");
  EXPECT_EQ(refusal([](auto& p) { p.operand_scale = 0.5f; }), "q and k are scaled in their own dtype");
}

TEST(Attention_Cpu, Flash_RefusesAShortWorkspace) {
  const AttentionCase spec{.sequences = {{1, 1, 1}}};
  AttentionMemory memory(spec, DType::kF32);
  EXPECT_EQ(cpu::flash_attention(memory.problem, {}, {}).code(), StatusCode::kInternal);
}

}  // namespace
}  // namespace polyop::testing
