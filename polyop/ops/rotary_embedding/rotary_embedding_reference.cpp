#include "polyop/core/dispatch.h"
#include "polyop/ops/rotary_embedding/rotary_embedding_problem.h"

namespace polyop {
namespace {

template <class T>
void rotate_head(const RotaryEmbeddingProblem& problem, int64_t position, const T* x, T* out) {
  problem.rotate_in_double(
      position, [&](int64_t channel) { return double{to_float(x[channel])}; },
      [&](int64_t channel, double value) { out[channel] = from_float<T>(static_cast<float>(value)); });
  for (int64_t channel = problem.rotary_dim; channel < problem.head_dim; ++channel) out[channel] = x[channel];
}

}  // namespace

Status rotary_embedding_reference(const RotaryEmbeddingProblem& problem, Workspace, Stream) {
  return visit_dtypes<float, F16, BF16>(problem.dtype, [&]<class T>() {
    for (int64_t token = 0; token < problem.num_tokens; ++token) {
      const int64_t position = problem.position(token);
      for (int32_t input = 0; input < problem.num_inputs; ++input) {
        const RotaryHeads& heads = problem.heads[input];
        for (int64_t head = 0; head < heads.num_heads; ++head) {
          const T* x = static_cast<const T*>(heads.x) + token * heads.x_token_stride + head * heads.x_head_stride;
          T* out = static_cast<T*>(heads.out) + token * heads.out_token_stride + head * heads.out_head_stride;
          rotate_head(problem, position, x, out);
        }
      }
    }
  });
}

}  // namespace polyop
