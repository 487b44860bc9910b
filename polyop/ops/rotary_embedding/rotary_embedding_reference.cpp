#include "polyop/core/dispatch.h"
#include "polyop/ops/rotary_embedding/rotary_embedding_problem.h"

namespace polyop {
namespace {

template <class T>
void rotate_head(const RotaryEmbeddingProblem& problem, const float* cosines, const float* sines, const T* x, T* out) {
  for (int64_t pair = 0; pair < problem.rotary_dim / 2; ++pair) {
    const int64_t first = problem.first_channel(pair);
    const int64_t second = problem.second_channel(pair);
    const double x1 = to_float(x[first]);
    const double x2 = to_float(x[second]);
    const double c = cosines[pair];
    const double s = sines[pair];
    out[first] = from_float<T>(static_cast<float>(x1 * c - x2 * s));
    out[second] = from_float<T>(static_cast<float>(x2 * c + x1 * s));
  }
  for (int64_t channel = problem.rotary_dim; channel < problem.head_dim; ++channel) out[channel] = x[channel];
}

}  // namespace

Status rotary_embedding_reference(const RotaryEmbeddingProblem& problem, Workspace, Stream) {
  return visit_dtypes<float, F16, BF16>(problem.dtype, [&]<class T>() {
    for (int64_t token = 0; token < problem.num_tokens; ++token) {
      const float* cosines = problem.cos_sin + problem.position(token) * problem.cos_sin_stride;
      const float* sines = cosines + problem.rotary_dim / 2;
      for (int32_t input = 0; input < problem.num_inputs; ++input) {
        const RotaryHeads& heads = problem.heads[input];
        for (int64_t head = 0; head < heads.num_heads; ++head) {
          const T* x = static_cast<const T*>(heads.x) + token * heads.x_token_stride + head * heads.x_head_stride;
          T* out = static_cast<T*>(heads.out) + token * heads.out_token_stride + head * heads.out_head_stride;
          rotate_head(problem, cosines, sines, x, out);
        }
      }
    }
  });
}

}  // namespace polyop
