// AttentionCase: one attention call in words (sequences, heads, layout), and AttentionMemory: that call in memory, with
// NaN in everything that must not be read and sentinels around everything that must not be written.
//
// Element values depend on the sequence's id, the tensor, the position, the head and the dim only: the same sequence
// has the same data in every batch and every layout.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "polyop/core/numeric_types.h"
#include "polyop/cpu/amx.h"
#include "polyop/ops/attention/attention_kernels.h"
#include "tests/cpp/testing/simd_targets.h"

namespace polyop::testing {

struct SequenceSpec {
  int64_t query_length = 0;
  int64_t kv_length = 0;
  uint64_t id = 0;
};

/// Whether run_fast() means amx_attention instead of flash_attention.
inline bool& tests_amx() {
  static bool value = false;
  return value;
}

/// Calls check() for flash_attention on each SIMD target of this processor, then for amx_attention where there is AMX.
template <class Check>
void on_every_flash_kernel(Check check) {
  on_every_simd_target(check);
  if (!cpu::has_amx_bf16()) {
    std::puts("[   NOTE   ] amx_attention: not tested, this machine has no AMX-BF16 or POLYOP_AMX=0 is set");
    return;
  }
  tests_amx() = true;
  SCOPED_TRACE("amx_attention");
  check();
  tests_amx() = false;
}

/// Dtypes of keys that the kernel under test takes.
inline std::vector<DType> key_dtypes() {
  if (tests_amx()) return {DType::kBF16};
  return {DType::kF32, DType::kF16, DType::kBF16};
}

struct AttentionCase {
  std::vector<SequenceSpec> sequences;
  int64_t num_query_heads = 4;
  int64_t num_kv_heads = 2;
  int64_t head_dim = 64;
  int64_t value_head_dim = 0;  // 0: as head_dim
  DType dtype = DType::kF32;
  AttentionQueryForm query_form = AttentionQueryForm::kPacked;
  AttentionKvForm kv_form = AttentionKvForm::kPaged;
  AttentionCausal causal = AttentionCausal::kLowerRight;
  int64_t page_size = 16;
  int64_t window = -1;
  bool sinks = false;
  int64_t rows_without_sequence = 0;
  int64_t gap = 0;          // extra elements between heads and between rows of every tensor
  uint64_t page_seed = 1;   // order of the pages in the pool
  int64_t spare_pages = 2;  // pages of no sequence
  int64_t table_slack = 3;  // page-table entries past the longest sequence
  float magnitude = 1.5f;   // elements are in [-magnitude, magnitude]

  [[nodiscard]] int64_t dv() const { return value_head_dim == 0 ? head_dim : value_head_dim; }

  [[nodiscard]] std::string to_string() const {
    std::string text = std::string(dtype_name(dtype)) + " Hq " + std::to_string(num_query_heads) + " Hkv " +
                       std::to_string(num_kv_heads) + " D " + std::to_string(head_dim) + " Dv " + std::to_string(dv()) +
                       " page " + std::to_string(page_size) + " kv form " + std::to_string(static_cast<int>(kv_form)) +
                       " causal " + std::to_string(static_cast<int>(causal)) + " window " + std::to_string(window) +
                       " (q, kv):";
    for (const auto& s : sequences)
      text += " (" + std::to_string(s.query_length) + ", " + std::to_string(s.kv_length) + ")";
    return text;
  }
};

/// In [-1, 1], a multiple of 2^-23, decided by its arguments alone.
inline float element_value(uint64_t tensor, uint64_t id, uint64_t position, uint64_t head, uint64_t dim) {
  uint64_t x = tensor * 0x9e3779b97f4a7c15u + id * 0xbf58476d1ce4e5b9u + position * 0x94d049bb133111ebu +
               head * 0xd6e8feb86659fd93u + dim * 0xa0761d6478bd642fu;
  for (int round = 0; round < 2; ++round) {
    x ^= x >> 32;
    x *= 0xe7037ed1a0b428dbu;
  }
  return static_cast<float>(static_cast<int64_t>(x >> 40) - (1 << 23)) * 0x1p-23f;
}

inline float element_at(const void* data, DType dtype, int64_t index) {
  switch (dtype) {
    case DType::kF16:
      return static_cast<const F16*>(data)[index].to_float();
    case DType::kBF16:
      return static_cast<const BF16*>(data)[index].to_float();
    default:
      return static_cast<const float*>(data)[index];
  }
}

inline void set_element(std::byte* to, DType dtype, float value) {
  switch (dtype) {
    case DType::kF16:
      *reinterpret_cast<F16*>(to) = F16::from_float(value);
      break;
    case DType::kBF16:
      *reinterpret_cast<BF16*>(to) = BF16::from_float(value);
      break;
    default:
      *reinterpret_cast<float*>(to) = value;
      break;
  }
}

inline constexpr std::byte kNanByte{0xff};       // all bits set is a NaN in f32, f16 and bf16
inline constexpr std::byte kSentinelByte{0x5a};  // what outputs hold before a call

struct AttentionResult {
  std::vector<float> out;  // [rows, Hq, Dv]
  std::vector<float> lse;  // [rows, Hq]
};

inline bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

class AttentionMemory {
 public:
  explicit AttentionMemory(const AttentionCase& spec, DType out_dtype) : spec_(spec), out_dtype_(out_dtype) {
    fill_queries();
    fill_keys();
    if (spec.sinks) {
      for (int64_t h = 0; h < spec.num_query_heads; ++h) sinks_.push_back(element_value(9, 0, 0, h, 0) * 2.0f);
      problem.sinks = sinks_.data();
    }
    problem.scale = 1.0f / std::sqrt(static_cast<float>(spec.head_dim));
    problem.causal = spec.causal;
    problem.window = spec.window;
  }

  /// Runs one kernel, checks the sentinels and returns the results densely.
  AttentionResult run(Status (*launch)(const AttentionProblem&, Workspace, Stream),
                      int64_t (*workspace_bytes)(const AttentionProblem&)) {
    std::fill(out_.begin(), out_.end(), kSentinelByte);
    std::fill(lse_.begin(), lse_.end(), kSentinelByte);
    const int64_t bytes = workspace_bytes(problem);
    const std::unique_ptr<std::byte[], void (*)(std::byte*)> workspace(
        static_cast<std::byte*>(::operator new[](static_cast<size_t>(bytes), std::align_val_t{kWorkspaceAlignment})),
        [](std::byte* p) { ::operator delete[](p, std::align_val_t{kWorkspaceAlignment}); });
    std::fill_n(workspace.get(), bytes, kNanByte);
    const Status status = launch(problem, {workspace.get(), bytes}, {});
    EXPECT_TRUE(status.is_ok()) << status.message();
    return collect();
  }

  /// The flash kernel under test (see on_every_flash_kernel).
  AttentionResult run_fast() {
    if (tests_amx()) return run(cpu::amx_attention, cpu::amx_attention_workspace_bytes);
    return run(cpu::flash_attention, cpu::flash_attention_workspace_bytes);
  }
  AttentionResult run_reference() { return run(attention_reference, attention_reference_workspace_bytes); }

  /// Address of one element of a key or value that belongs to a sequence.
  std::byte* key_element(const HeadRows& rows, int64_t sequence, int64_t key, int64_t kv_head, int64_t dim) {
    return problem.key_address(rows, sequence, key, kv_head) + dim * dtype_bytes(rows.dtype);
  }

  AttentionProblem problem;

 private:
  static HeadRows rows_of(std::vector<std::byte>& memory, DType dtype, int64_t outer, int64_t rows, int64_t heads,
                          int64_t width, int64_t gap, std::byte fill) {
    const int64_t head_stride = width + gap;
    const int64_t row_stride = heads * head_stride + gap;
    // The last row ends where the memory ends, so that a read past it is caught by the address sanitizer.
    const int64_t elems = outer * rows == 0 ? 0 : (outer * rows - 1) * row_stride + (heads - 1) * head_stride + width;
    memory.assign(static_cast<size_t>(elems * dtype_bytes(dtype)), fill);
    return {memory.data(), dtype, rows * row_stride, row_stride, head_stride};
  }

  void fill_queries() {
    const auto num_sequences = static_cast<int64_t>(spec_.sequences.size());
    int64_t longest = 0;
    query_offsets_ = {0};
    for (const SequenceSpec& s : spec_.sequences) {
      query_offsets_.push_back(query_offsets_.back() + static_cast<int32_t>(s.query_length));
      query_lengths_.push_back(static_cast<int32_t>(s.query_length));
      longest = std::max(longest, s.query_length);
    }
    const bool padded = spec_.query_form == AttentionQueryForm::kPadded;
    const int64_t outer = padded ? num_sequences : 1;
    const int64_t rows = padded ? longest + 1 : query_offsets_.back() + spec_.rows_without_sequence;
    problem.num_sequences = num_sequences;
    problem.num_query_heads = spec_.num_query_heads;
    problem.num_kv_heads = spec_.num_kv_heads;
    problem.head_dim = spec_.head_dim;
    problem.value_head_dim = spec_.dv();
    problem.query_form = spec_.query_form;
    problem.num_query_rows = outer * rows;
    problem.padded_query_length = padded ? rows : 0;
    problem.query_offsets = padded ? nullptr : query_offsets_.data();
    problem.query_lengths = padded ? query_lengths_.data() : nullptr;
    problem.q = rows_of(q_, spec_.dtype, outer, rows, spec_.num_query_heads, spec_.head_dim, spec_.gap, kNanByte);
    problem.out = rows_of(out_, out_dtype_, outer, rows, spec_.num_query_heads, spec_.dv(), spec_.gap, kSentinelByte);
    problem.lse = rows_of(lse_, DType::kF32, outer, rows, spec_.num_query_heads, 1, spec_.gap, kSentinelByte);
    for (int64_t b = 0; b < num_sequences; ++b) {
      const SequenceSpec& s = spec_.sequences[b];
      for (int64_t i = 0; i < s.query_length; ++i) {
        // Rows are told apart by their distance to the last key, so that a chunk of a prompt has the prompt's rows.
        const int64_t position = i + s.kv_length - s.query_length;
        for (int64_t h = 0; h < spec_.num_query_heads; ++h) {
          for (int64_t d = 0; d < spec_.head_dim; ++d) {
            set_element(problem.row_address(problem.q, b, i, h) + d * dtype_bytes(spec_.dtype), spec_.dtype,
                        spec_.magnitude * element_value(1, s.id, position + 1000, h, d));
          }
        }
      }
    }
  }

  void fill_keys() {
    const auto num_sequences = static_cast<int64_t>(spec_.sequences.size());
    int64_t longest = 0;
    int64_t num_pages = spec_.spare_pages;
    kv_offsets_ = {0};
    for (const SequenceSpec& s : spec_.sequences) {
      kv_lengths_.push_back(static_cast<int32_t>(s.kv_length));
      kv_offsets_.push_back(kv_offsets_.back() + static_cast<int32_t>(s.kv_length));
      longest = std::max(longest, s.kv_length);
      num_pages += (s.kv_length + spec_.page_size - 1) / spec_.page_size;
    }
    int64_t outer = 1;
    int64_t rows = kv_offsets_.back();
    problem.kv_form = spec_.kv_form;
    problem.kv_capacity = rows;
    if (spec_.kv_form == AttentionKvForm::kPacked) {
      problem.kv_offsets = kv_offsets_.data();
    } else {
      problem.kv_lengths = kv_lengths_.data();
    }
    if (spec_.kv_form == AttentionKvForm::kPadded) {
      outer = num_sequences;
      rows = longest + 2;
      problem.kv_capacity = rows;
    }
    if (spec_.kv_form == AttentionKvForm::kPaged) {
      outer = num_pages;
      rows = spec_.page_size;
      const int64_t width = (longest + spec_.page_size - 1) / spec_.page_size + spec_.table_slack;
      std::vector<int32_t> order(static_cast<size_t>(num_pages));
      std::iota(order.begin(), order.end(), 0);
      std::shuffle(order.begin(), order.end(), std::mt19937_64(spec_.page_seed));
      page_table_.assign(static_cast<size_t>(num_sequences * width), 1 << 30);
      size_t next = 0;
      for (int64_t b = 0; b < num_sequences; ++b) {
        const int64_t used = (spec_.sequences[b].kv_length + spec_.page_size - 1) / spec_.page_size;
        for (int64_t w = 0; w < used; ++w) page_table_[b * width + w] = order[next++];
      }
      problem.page_table = page_table_.data();
      problem.page_table_stride = width;
      problem.page_size = spec_.page_size;
      problem.num_pages = num_pages;
      problem.kv_capacity = width * spec_.page_size;
    }
    problem.k = rows_of(k_, spec_.dtype, outer, rows, spec_.num_kv_heads, spec_.head_dim, spec_.gap, kNanByte);
    problem.v = rows_of(v_, spec_.dtype, outer, rows, spec_.num_kv_heads, spec_.dv(), spec_.gap, kNanByte);
    for (int64_t b = 0; b < num_sequences; ++b) {
      const SequenceSpec& s = spec_.sequences[b];
      for (int64_t j = 0; j < s.kv_length; ++j) {
        for (int64_t h = 0; h < spec_.num_kv_heads; ++h) {
          for (int64_t d = 0; d < spec_.head_dim; ++d) {
            set_element(key_element(problem.k, b, j, h, d), spec_.dtype,
                        spec_.magnitude * element_value(2, s.id, j, h, d));
          }
          for (int64_t d = 0; d < spec_.dv(); ++d) {
            set_element(key_element(problem.v, b, j, h, d), spec_.dtype,
                        spec_.magnitude * element_value(3, s.id, j, h, d));
          }
        }
      }
    }
  }

  // Takes the results out and checks that every byte between them is as it was.
  AttentionResult collect() {
    AttentionResult result;
    const auto take = [&](std::vector<std::byte>& memory, const HeadRows& rows, int64_t width, std::vector<float>* to) {
      const bool padded = spec_.query_form == AttentionQueryForm::kPadded;
      const int64_t outer = padded ? problem.num_sequences : 1;
      const int64_t rows_each = outer == 0 ? 0 : problem.num_query_rows / outer;
      std::vector<bool> written(memory.size(), false);
      for (int64_t b = 0; b < outer; ++b) {
        for (int64_t row = 0; row < rows_each; ++row) {
          for (int64_t h = 0; h < problem.num_query_heads; ++h) {
            const std::byte* from = rows.at(b, row, h);
            for (int64_t d = 0; d < width; ++d) to->push_back(element_at(from, rows.dtype, d));
            const auto start = static_cast<size_t>(from - memory.data());
            std::fill_n(written.begin() + static_cast<std::ptrdiff_t>(start), width * dtype_bytes(rows.dtype), true);
          }
        }
      }
      size_t spoiled = 0;
      for (size_t i = 0; i < memory.size(); ++i) spoiled += !written[i] && memory[i] != kSentinelByte;
      EXPECT_EQ(spoiled, 0u) << "bytes between the outputs changed";
    };
    take(out_, problem.out, spec_.dv(), &result.out);
    if (problem.lse.data != nullptr) take(lse_, problem.lse, 1, &result.lse);
    return result;
  }

  AttentionCase spec_;
  DType out_dtype_;
  std::vector<std::byte> q_, k_, v_, out_, lse_;
  std::vector<float> sinks_;
  std::vector<int32_t> query_offsets_, query_lengths_, kv_offsets_, kv_lengths_, page_table_;
};

/// The bound of the README for one call: element errors of `out` and `lse` against exact results.
struct AttentionBound {
  double weights;   // factor of max |v|
  double rounding;  // factor of |out|: unit roundoff of the output dtype
  double floor;     // half the least subnormal of the output dtype
  double lse;

  AttentionBound(const AttentionCase& spec, DType out_dtype) {
    constexpr double kUnit = 0x1p-24;
    int64_t longest = 1;
    for (const SequenceSpec& s : spec.sequences) longest = std::max(longest, s.kv_length);
    const auto depth = static_cast<double>(spec.head_dim);
    // |q| and |k| are at most the magnitude: sum_d |q_d k_d| <= D magnitude^2.
    const double logits = depth * spec.magnitude * spec.magnitude / std::sqrt(depth);
    const int64_t chunk = tests_amx() ? 256 : 512;
    const double in_chunk = std::sqrt(static_cast<double>(std::min(longest, chunk)));
    const double chunks = std::ceil(static_cast<double>(longest) / static_cast<double>(chunk));
    const double of_logits = 4.0 * std::sqrt(depth + 4.0) * logits;
    weights = kUnit * (2.0 * of_logits + 8.0 * in_chunk + 16.0 * chunks + 16.0);
    if (tests_amx() && out_dtype != DType::kF32) weights += 0x1p-17;  // weights of 16 significant bits
    lse = kUnit * (of_logits + 4.0 * in_chunk + 16.0 * chunks + 16.0);
    rounding = out_dtype == DType::kF32 ? kUnit : out_dtype == DType::kF16 ? 0x1p-11 : 0x1p-8;
    floor = out_dtype == DType::kF16 ? 0x1p-25 : 0x1p-126;
  }
};

/// The fast kernel against the reference, both on `memory_of(dtype of out)`.
inline void expect_matches_reference(const AttentionCase& spec) {
  SCOPED_TRACE(spec.to_string());
  AttentionMemory fast(spec, spec.dtype);
  AttentionMemory exact(spec, DType::kF32);
  const Status supported =
      tests_amx() ? cpu::supports_amx_attention(fast.problem) : cpu::supports_flash_attention(fast.problem);
  ASSERT_TRUE(supported.is_ok()) << supported.message();
  const AttentionResult got = fast.run_fast();
  const AttentionResult wanted = exact.run_reference();
  const AttentionBound bound(spec, spec.dtype);
  double worst = 0.0;
  size_t worst_at = 0;
  ASSERT_EQ(got.out.size(), wanted.out.size());
  for (size_t i = 0; i < got.out.size(); ++i) {
    const double allowed = bound.weights * spec.magnitude + bound.rounding * std::abs(wanted.out[i]) + bound.floor;
    const double error = std::abs(static_cast<double>(got.out[i]) - wanted.out[i]);
    const double ratio = std::isfinite(got.out[i]) ? error / allowed : HUGE_VAL;
    if (ratio > worst) worst = ratio, worst_at = i;
  }
  EXPECT_LE(worst, 1.0) << "out element " << worst_at << " is " << got.out[worst_at] << ", wanted "
                        << wanted.out[worst_at];
  ASSERT_EQ(got.lse.size(), wanted.lse.size());
  for (size_t i = 0; i < got.lse.size(); ++i) {
    if (std::isinf(wanted.lse[i])) {
      EXPECT_EQ(got.lse[i], wanted.lse[i]) << "lse element " << i;
    } else {
      EXPECT_NEAR(got.lse[i], wanted.lse[i], bound.lse + 0x1p-22 * std::abs(wanted.lse[i])) << "lse element " << i;
    }
  }
}

}  // namespace polyop::testing
