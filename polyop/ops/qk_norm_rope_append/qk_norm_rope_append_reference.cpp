#include <cmath>

#include "polyop/core/dispatch.h"
#include "polyop/ops/qk_norm_rope_append/qk_norm_rope_append_problem.h"

namespace polyop {
namespace {

double weight_of(const HeadNorm& norm, int64_t channel) {
  switch (norm.weight_dtype) {
    case DType::kF16:
      return to_float(static_cast<const F16*>(norm.weight)[channel]);
    case DType::kBF16:
      return to_float(static_cast<const BF16*>(norm.weight)[channel]);
    default:
      return static_cast<const float*>(norm.weight)[channel];
  }
}

/// One head: store(channel, value of T) takes norm and rotation of `x` [D], rounded once.
template <class T, class StoreElement>
void norm_and_rotate(const QkNormRopeAppendProblem& problem, const HeadNorm& norm, int64_t position, const T* x,
                     StoreElement&& store) {
  const int64_t head_dim = problem.append.head_dim;
  double factor = 1.0;
  if (norm.weight != nullptr) {
    double sum = 0.0;
    for (int64_t i = 0; i < head_dim; ++i) sum += double{to_float(x[i])} * double{to_float(x[i])};
    factor = 1.0 / std::sqrt(sum / static_cast<double>(head_dim) + double{problem.epsilon});
  }
  const auto load = [&](int64_t channel) {
    const double value = to_float(x[channel]);
    return norm.weight == nullptr ? value : value * factor * weight_of(norm, channel);
  };
  const auto store_rounded = [&](int64_t channel, double value) {
    store(channel, from_float<T>(static_cast<float>(value)));
  };
  problem.rotary.rotate_in_double(position, load, store_rounded);
  for (int64_t channel = problem.rotary.rotary_dim; channel < head_dim; ++channel) {
    if (norm.weight == nullptr) {
      store(channel, x[channel]);
    } else {
      store_rounded(channel, load(channel));
    }
  }
}

/// Token `token` of the batch, which goes to row `row` of page `page`.
template <class T>
void run_token(const QkNormRopeAppendProblem& problem, int64_t token, int64_t position, int64_t page, int64_t row) {
  const KvCacheAppend& append = problem.append;
  for (int64_t head = 0; head < problem.num_query_heads; ++head) {
    T* out = static_cast<T*>(problem.q_out) + token * problem.q_out_token_stride + head * problem.q_out_head_stride;
    norm_and_rotate(problem, problem.q_norm, position,
                    static_cast<const T*>(problem.q) + token * problem.q_token_stride + head * problem.q_head_stride,
                    [&](int64_t channel, T value) { out[channel] = value; });
  }
  for (int plane_index = 0; plane_index < 2; ++plane_index) {
    const KvCachePlane& plane = append.planes[plane_index];
    for (int64_t head = 0; head < append.num_kv_heads; ++head) {
      const T* x =
          static_cast<const T*>(plane.update) + token * plane.update_token_stride + head * plane.update_head_stride;
      const int64_t to = page * plane.page_stride + row * plane.row_stride + head * plane.cache_head_stride;
      const auto store = [&](int64_t channel, T value) {
        store_kv_cache_element(append, &value, kv_cache_scale(plane, head),
                               static_cast<char*>(plane.cache) + (to + channel) * dtype_bytes(append.cache_dtype));
      };
      if (plane_index == 0) {
        norm_and_rotate(problem, problem.k_norm, position, x, store);
      } else {
        for (int64_t channel = 0; channel < append.head_dim; ++channel) store(channel, x[channel]);
      }
    }
  }
}

}  // namespace

Status qk_norm_rope_append_reference(const QkNormRopeAppendProblem& problem, Workspace, Stream) {
  const KvCacheAppend& append = problem.append;
  return visit_dtypes<float, F16, BF16>(problem.dtype(), [&]<class T>() {
    for (int64_t sequence = 0; sequence < append.num_sequences; ++sequence) {
      for (int64_t token = append.token_offset(sequence); token < append.token_offset(sequence + 1); ++token) {
        const int64_t cache_position = append.write_position(sequence) + token - append.token_offset(sequence);
        const int64_t position = problem.position(token, cache_position);
        if (position == QkNormRopeAppendProblem::kNoSlot) continue;
        run_token<T>(problem, token, position, append.page(sequence, cache_position / append.page_size),
                     cache_position % append.page_size);
      }
    }
  });
}

}  // namespace polyop
