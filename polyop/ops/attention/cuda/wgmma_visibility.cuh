// Which keys the rows of a multiplying warpgroup see.
#pragma once

#include <cstdint>

#include "polyop/ops/attention/cuda/split_parts.cuh"
#include "polyop/ops/attention/cuda/wgmma_plan.cuh"

namespace polyop::cuda {

/// Visible keys of a lane's two rows, and those that all rows of its warp see. Rows that do not attend see all: what
/// they gather is dropped.
class WgmmaVisibility {
 public:
  /// `row`: the lane's first one in its sequence, in rows x G; the other one is eight further.
  __device__ WgmmaVisibility(const SplitCall& call, const WgmmaWalk& walk, int32_t row)
      : call_(call), walk_(walk), row_(row) {
    common_begin_ = 0;
    common_end_ = INT32_MAX;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      begin_[half] = 0;
      end_[half] = INT32_MAX;
      const int32_t query_row = (row_ + half * 8) / call_.plan.group_size;
      attends_[half] = query_row < geometry().query_rows;
      if (!attends_[half]) continue;
      const KeyRange visible = geometry().visible(call_.p, query_row);
      begin_[half] = visible.begin;
      end_[half] = visible.end;
      common_begin_ = max(common_begin_, visible.begin);
      common_end_ = min(common_end_, visible.end);
      if (call_.p.tree_mask.words != nullptr)
        common_end_ = min(common_end_, geometry().kv_length - geometry().allotted);
    }
#pragma unroll
    for (int step = 4; step < 32; step *= 2) {
      common_begin_ = max(common_begin_, __shfl_xor_sync(0xffffffffu, common_begin_, step));
      common_end_ = min(common_end_, __shfl_xor_sync(0xffffffffu, common_end_, step));
    }
  }

  [[nodiscard]] __device__ bool attends(int half) const { return attends_[half]; }

  /// Scores of the tile that begins with `key`: -inf where a row does not see the key.
  __device__ void hide(int32_t key, float (&score)[64]) const {
    if (key < common_begin_ || key + kWgmmaTileKeys > common_end_) hide_keys(key, score);
  }

 private:
  [[nodiscard]] __device__ const SequenceGeometry& geometry() const { return walk_.sequence.geometry; }

  __device__ void hide_keys(int32_t key, float (&score)[64]) const {
    const int32_t own = key + 2 * (static_cast<int32_t>(threadIdx.x) % 4);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t begin = begin_[half] - own;
      const int32_t end = end_[half] - own;
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        const int32_t at = i / 2 * 8 + i % 2;
        if (at < begin || at >= end) score[i / 2 * 4 + half * 2 + i % 2] = -INFINITY;
      }
    }
    const SequenceGeometry& g = geometry();
    if (call_.p.tree_mask.words != nullptr && key + kWgmmaTileKeys > g.kv_length - g.allotted)
      hide_branches(key, score);
  }

  /// Keys that the tree bits hide.
  __device__ void hide_branches(int32_t key, float (&score)[64]) const {
    const AttentionProblem& p = call_.p;
    const SequenceGeometry& g = geometry();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (!attends_[half]) continue;
      const int64_t global_row = int64_t{g.row_begin} + (row_ + half * 8) / call_.plan.group_size;
      const int32_t* words = p.tree_mask.words + global_row * p.tree_mask.row_stride;
      const int32_t last_word = (g.allotted - 1) / 32;
      const auto word = [&](int32_t index) {  // keys before the tree are visible, those behind it are not there
        return index < 0 ? ~0u : index > last_word ? 0u : static_cast<uint32_t>(__ldg(words + index));
      };
#pragma unroll
      for (int span = 0; span < kWgmmaTileKeys / 32; ++span) {
        const int32_t column = key + span * 32 - (g.kv_length - g.allotted);
        const uint32_t bits = __funnelshift_r(word(column >> 5), word((column >> 5) + 1), column & 31) >>
                              2 * (static_cast<int32_t>(threadIdx.x) % 4);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          if ((bits >> (i / 2 * 8 + i % 2) & 1u) == 0) score[(span * 4 + i / 2) * 4 + half * 2 + i % 2] = -INFINITY;
        }
      }
    }
  }

  const SplitCall& call_;
  const WgmmaWalk& walk_;
  int32_t row_;
  bool attends_[2];
  int32_t begin_[2];  // visible keys
  int32_t end_[2];
  int32_t common_begin_;
  int32_t common_end_;
};

}  // namespace polyop::cuda
