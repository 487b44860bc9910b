// How one call of the AMX kernel of int4_groupwise_gemm is cut into tiles, and where its scratch memory lies. No cut
// touches a result: sums over a group are exact.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <numeric>

#include "polyop/cpu/amx.h"
#include "polyop/ops/int4_groupwise_gemm/cpu/int4_groupwise_gemm_plan.h"

namespace polyop::cpu {

inline constexpr int64_t kAmxPassRows = 256;     // rows of x that are packed at a time: bounds the workspace
inline constexpr int64_t kAmxBlockBytes = 1024;  // few rows: 64 depths x 16 columns of weights as bytes
inline constexpr int64_t kAmxBf16BlockBytes = 2 * kAmxBlockBytes;
inline constexpr int64_t kAmxSumBytes = 1024;  // a tile of sums
inline constexpr int64_t kAmxVectorFloats = 16;
inline constexpr int64_t kAmxTaskTiles = 2 * kUnitsPerBlock;  // of 16 columns, in a fragment block
inline constexpr int64_t kAmxFewSlots = 4;                    // groups that share a tile of sums at most
inline constexpr int64_t kAmxChunkDepth = 128;  // depths of many rows that are multiplied at a time, if groups allow
// A span of many rows may start and end inside a block of 64 depths, and a single group may be longer.
inline constexpr int64_t kAmxSpanBlocks = kMaxGroupSize / kFragmentDepth + 1;
inline constexpr int64_t kAmxSpanGroups = kAmxChunkDepth / 16;

// Groups of numbers below 2^-90 are cut off as those at 2^-90 are, so that factors stay normal f32 numbers; with
// numbers of 2^100 and more, sums could overflow on the way.
inline constexpr int kAmxLeastExponent = -90;
inline constexpr int kAmxGreatestExponent = 100;

/// 2^exponent, a normal number.
constexpr float power_of_two(int exponent) { return std::bit_cast<float>((exponent + 127) << 23); }

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/// Extents of one pass: at most kAmxPassRows rows of a call.
///
/// Few rows: the digits of all rows fit a tile of 16 rows, often those of several groups ("slots") below each other. A
/// span is the groups that share such a tile of sums, 64 depths or more. Many rows: a span is the groups that are
/// multiplied at a time.
///
/// A segment is the depth of one product: at most 64 (few rows, bytes) or 32 (many rows, bf16), and a divisor of the
/// depth of a span (few) or of a group (many), so that it lies in one fragment block.
struct AmxPlan {
  int64_t digits;        // bytes that a number of x becomes
  int64_t groups;        // ceil(K / Kg)
  int64_t depth_blocks;  // ceil(K / 64)
  int64_t units;         // of 32 columns
  int64_t span_groups;
  int64_t segment_depth;
  int64_t span_segments;
  int64_t segments;   // of K
  int64_t rows;       // of the pass
  int64_t tile_rows;  // rows rounded up to 16, where factors and totals of many rows stand
  bool few;
  bool chained;  // a group is at most 32 deep: its digits can be added up in one tile

  AmxPlan(const Int4GroupwiseGemmProblem& problem, int64_t pass_rows) {
    const GemmPlan extents(problem);
    digits = problem.x_dtype == DType::kF32 ? 4 : 3;
    groups = extents.groups;
    depth_blocks = extents.depth_blocks;
    units = extents.units;
    rows = pass_rows;
    tile_rows = ceil_div(rows, kAmxRows) * kAmxRows;
    const int64_t slots = std::min(kAmxFewSlots, kAmxRows / std::max<int64_t>(1, rows * digits));
    few = slots * problem.group_size >= kFragmentDepth && rows * digits <= kAmxRows / 2;
    if (few) {
      span_groups = std::clamp<int64_t>(2 * kFragmentDepth / problem.group_size, 1, slots);
      segment_depth = std::gcd(span_groups * problem.group_size, kFragmentDepth);
    } else {
      span_groups = std::max<int64_t>(1, kAmxChunkDepth / problem.group_size);
      segment_depth = std::gcd<int64_t>(problem.group_size, kAmxDepth);
    }
    chained = kAmxDepth % problem.group_size == 0;
    span_segments = span_groups * problem.group_size / segment_depth;
    segments = ceil_div(problem.k, segment_depth);
  }

  [[nodiscard]] int64_t left_tile_bytes() const { return kAmxRows * segment_depth * (few ? 1 : 2); }
  [[nodiscard]] int64_t spans() const { return ceil_div(groups, span_groups); }
  [[nodiscard]] int64_t left_bytes() const {
    return segments * left_tile_bytes() * (few ? 1 : tile_rows / kAmxRows * digits);
  }
};

/// The workspace: packed x, which is a flag for each row of the pass, its powers of two and its digits; then the
/// scratch of each thread. Few rows: each thread has packed x of its own, because packing it takes no longer than
/// fetching it from another processor's cache.
struct AmxLayout {
  int64_t factor_bytes;
  int64_t left_bytes;
  int64_t thread_bytes;
  bool few;

  explicit AmxLayout(const AmxPlan& plan) {
    factor_bytes = plan.groups * plan.tile_rows * static_cast<int64_t>(sizeof(float));
    left_bytes = plan.left_bytes();
    few = plan.few;
    thread_bytes = kScalesBytes + kSumsBytes + kAmxTaskTiles * totals_rows(plan) * kAmxVectorBytes +
                   kAmxTaskTiles * kAmxSpanBlocks * kAmxBf16BlockBytes;
  }

  /// Flags, factors and digits.
  [[nodiscard]] int64_t packed_bytes() const { return kAmxPassRows + factor_bytes + left_bytes; }
  [[nodiscard]] int64_t bytes(int num_threads) const {
    return (few ? num_threads : 1) * packed_bytes() + num_threads * thread_bytes;
  }

  static int64_t totals_rows(const AmxPlan& plan) { return plan.few ? plan.rows : plan.tile_rows; }

  static constexpr int64_t kAmxVectorBytes = kAmxVectorFloats * static_cast<int64_t>(sizeof(float));
  static constexpr int64_t kScalesBytes = kAmxSpanGroups * kAmxTaskTiles * kAmxVectorBytes;
  static constexpr int64_t kSumsBytes = 2 * kAmxSumBytes;
};

/// The part of the depth that one span takes.
struct AmxSpan {
  int64_t first_group, end_group;
  int64_t first_segment, end_segment;
  int64_t first_block, end_block;

  AmxSpan(const AmxPlan& plan, int64_t span) {
    first_group = span * plan.span_groups;
    end_group = std::min(plan.groups, first_group + plan.span_groups);
    first_segment = span * plan.span_segments;
    end_segment = std::min(plan.segments, first_segment + plan.span_segments);
    first_block = first_segment * plan.segment_depth / kFragmentDepth;
    end_block = ceil_div(end_segment * plan.segment_depth, kFragmentDepth);
  }
};

/// Where the parts of a workspace lie.
struct AmxWorkspace {
  uint8_t* row_is_taken;  // [kAmxPassRows]
  float* factors;         // few: [groups, tile_rows]: what a sum with the digits of a row and group stands for
  int8_t* left;           // tiles of digits: few [segments], many [tile_rows / 16, segments, digits]

  struct Thread {
    float* scales;   // [groups, tiles, 16]
    int32_t* sums;   // 2 tiles (f32 for many rows)
    float* totals;   // [tiles, rows, 16]
    int8_t* blocks;  // widened weights: few: a ring of [2, 16, 64] bytes; many: [tiles, blocks, 32, 32] bf16
  };

  AmxWorkspace(const AmxPlan& plan, const AmxLayout& layout, void* memory, int num_threads) : layout_(layout) {
    place(static_cast<uint8_t*>(memory));
    threads_ = row_is_taken + (plan.few ? num_threads : 1) * layout.packed_bytes();
    totals_bytes_ = kAmxTaskTiles * AmxLayout::totals_rows(plan) * AmxLayout::kAmxVectorBytes;
  }

  /// Few rows: with the packed x of a thread; number 0 is that of the object itself.
  [[nodiscard]] AmxWorkspace with_packed(int64_t number) const {
    AmxWorkspace other = *this;
    other.place(row_is_taken + number * layout_.packed_bytes());
    return other;
  }

  [[nodiscard]] Thread thread(int index) const {
    uint8_t* base = threads_ + index * layout_.thread_bytes;
    Thread thread;
    thread.scales = reinterpret_cast<float*>(base);
    thread.sums = reinterpret_cast<int32_t*>(base + AmxLayout::kScalesBytes);
    thread.totals = reinterpret_cast<float*>(base + AmxLayout::kScalesBytes + AmxLayout::kSumsBytes);
    thread.blocks = reinterpret_cast<int8_t*>(thread.totals) + totals_bytes_;
    return thread;
  }

 private:
  void place(uint8_t* packed) {
    row_is_taken = packed;
    factors = reinterpret_cast<float*>(packed + kAmxPassRows);
    left = reinterpret_cast<int8_t*>(packed + kAmxPassRows + layout_.factor_bytes);
  }

  AmxLayout layout_;
  uint8_t* threads_;
  int64_t totals_bytes_;
};

}  // namespace polyop::cpu
