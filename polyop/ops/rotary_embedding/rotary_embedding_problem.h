// RotaryEmbeddingProblem: one bound call of rotary_embedding; the only thing its kernels receive.
#pragma once

#include <array>
#include <cstdint>

#include "polyop/core/dtype.h"
#include "polyop/core/kernel_list.h"
#include "polyop/core/rotary_table.h"

namespace polyop {

/// The heads of q or of k: [T, heads, D], D dense, other strides free (elements). `out` is `x` with the same strides,
/// or memory of its own.
struct RotaryHeads {
  const void* x = nullptr;
  void* out = nullptr;
  int64_t num_heads = 0;
  int64_t x_token_stride = 0;
  int64_t x_head_stride = 0;
  int64_t out_token_stride = 0;
  int64_t out_head_stride = 0;
};

struct RotaryEmbeddingProblem : RotaryTable {
  std::array<RotaryHeads, 2> heads;  // q, then k
  int32_t num_inputs = 1;            // 1: q alone
  DType dtype = DType::kF32;         // of q and k and their outputs
  int64_t num_tokens = 0;            // T
  int64_t head_dim = 0;              // D

  /// Row of cos_sin that token `token` is rotated by.
  [[nodiscard]] constexpr int64_t position(int64_t token) const {
    return position_ids == nullptr ? token : position_id(token);
  }
};

/// Element by element in double; the specification in code.
Status rotary_embedding_reference(const RotaryEmbeddingProblem& problem, Workspace workspace, Stream stream);

namespace cpu {

/// Vector code for the processor at hand, threads over tokens.
Status rotary_embedding_rows(const RotaryEmbeddingProblem& problem, Workspace workspace, Stream stream);

}  // namespace cpu

namespace cuda {

/// A warp for each token's share of heads, 16-byte accesses; takes every call. Tokens with a position outside cos_sin
/// are left unwritten and flagged.
Status rotary_embedding_tokens(const RotaryEmbeddingProblem& problem, Workspace workspace, Stream stream);

}  // namespace cuda
}  // namespace polyop
