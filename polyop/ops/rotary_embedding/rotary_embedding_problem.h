// RotaryEmbeddingProblem: one bound call of rotary_embedding; the only thing its kernels receive.
#pragma once

#include <array>
#include <cstdint>

#include "polyop/core/dtype.h"
#include "polyop/core/kernel_list.h"

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

struct RotaryEmbeddingProblem {
  std::array<RotaryHeads, 2> heads;    // q, then k
  int32_t num_inputs = 1;              // 1: q alone
  DType dtype = DType::kF32;           // of q and k and their outputs
  int64_t num_tokens = 0;              // T
  int64_t head_dim = 0;                // D
  int64_t rotary_dim = 0;              // Drot, even, at most D
  bool interleaved = false;            // pairs (2j, 2j+1) instead of (j, j + Drot/2)
  const float* cos_sin = nullptr;      // [Lmax, Drot]: Drot/2 cosines, then Drot/2 sines
  int64_t cos_sin_stride = 0;          // elements between rows
  int64_t num_positions = 0;           // Lmax
  const void* position_ids = nullptr;  // [T] i32 or i64, dense; null: row t belongs to token t
  bool position_ids_are_i64 = false;

  /// Row of cos_sin that token `token` is rotated by.
  [[nodiscard]] constexpr int64_t position(int64_t token) const {
    if (position_ids == nullptr) return token;
    return position_ids_are_i64 ? static_cast<const int64_t*>(position_ids)[token]
                                : static_cast<const int32_t*>(position_ids)[token];
  }
  /// Channel of the first element of pair `pair`, and of the second.
  [[nodiscard]] int64_t first_channel(int64_t pair) const { return interleaved ? 2 * pair : pair; }
  [[nodiscard]] int64_t second_channel(int64_t pair) const {
    return interleaved ? 2 * pair + 1 : pair + rotary_dim / 2;
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
