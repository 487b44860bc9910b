#include "polyop/ops/operators.h"

#include <cstdio>

#include "polyop/ops/attention/attention.h"
#include "polyop/ops/attention/fronts/trt_attention.h"
#include "polyop/ops/circular_pad/circular_pad.h"
#include "polyop/ops/int4_groupwise_gemm/int4_groupwise_gemm.h"
#include "polyop/ops/int4_groupwise_gemm/packing_operators.h"
#include "polyop/ops/kv_cache_update/fronts/trt_kv_cache_update.h"
#include "polyop/ops/kv_cache_update/kv_cache_update.h"
#include "polyop/ops/qk_norm_rope_append/qk_norm_rope_append.h"
#include "polyop/ops/rotary_embedding/rotary_embedding.h"

namespace polyop {

const OpRegistry& operators() {
  static const OpRegistry registry = [] {
    OpRegistry ops;
    for (auto* make :
         {make_attention_operator, make_circular_pad_operator, make_int4_groupwise_gemm_operator,
          make_kv_cache_update_operator, make_qk_norm_rope_append_operator, make_rotary_embedding_operator,
          make_pack_int4_fragments_operator, make_unpack_int4_fragments_operator, make_trt_attention_operator,
          make_trt_quantized_attention_operator, make_trt_kv_cache_update_operator}) {
      // A schema with defects is a bug that tests/cpp/ops catches; it leaves the operator out instead of ending the
      // process.
      if (const Status status = ops.add(make()); !status.is_ok()) {
        std::fprintf(stderr, "polyop: %s\n", status.message().c_str());
      }
    }
    return ops;
  }();
  return registry;
}

}  // namespace polyop
