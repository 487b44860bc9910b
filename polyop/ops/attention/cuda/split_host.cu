#include <algorithm>
#include <bit>

#include "polyop/core/kernel_list.h"
#include "polyop/ops/attention/cuda/split_host.h"

namespace polyop::cuda {

Status supports_split_weights(const AttentionProblem& p) {
  if (p.mask.data != nullptr) return unsupported("it has a dense mask");
  if (p.normalization != AttentionNormalization::kSoftmax) return unsupported("normalization is not softmax");
  if (p.weight_quantization != AttentionWeightQuantization::kNone) return unsupported("weights are quantized");
  return Status::ok();
}

Status supports_split_keys(const AttentionProblem& p) {
  constexpr int64_t kMost = int64_t{1} << 30;
  if (p.num_query_rows * p.num_query_heads > kMost || p.kv_capacity > kMost) {
    return unsupported("more than 2^30 rows of heads or keys");
  }
  if (p.k.outer_stride != p.v.outer_stride || p.k.row_stride != p.v.row_stride || p.k.head_stride != p.v.head_stride) {
    return unsupported("k and v have other strides");
  }
  return Status::ok();
}

void describe_keys(const AttentionProblem& p, SplitPlan* plan) {
  plan->row_bytes = p.k.row_stride * dtype_bytes(p.k.dtype);
  if (p.kv_form != AttentionKvForm::kPaged) return;
  plan->page_bytes = p.k.outer_stride * dtype_bytes(p.k.dtype);
  plan->page_size = static_cast<uint32_t>(p.page_size);
  plan->num_pages = static_cast<uint32_t>(std::min<int64_t>(p.num_pages, int64_t{1} << 31));
  if (std::has_single_bit(plan->page_size)) plan->page_shift = std::countr_zero(plan->page_size);
  plan->tiles_are_dense = p.page_size % kKeysPerTile == 0;
}

}  // namespace polyop::cuda
