// TRT_Attention: weights = softmax(Q K^T + mask); nothing is scaled, the caller multiplies Q beforehand.
#include "polyop/ops/attention/fronts/trt_attention.h"

#include <string>

#include "polyop/ops/attention/attention_kernels.h"
#include "polyop/ops/attention/fronts/trt_forms.h"

namespace polyop {
namespace {

enum Attribute : int { kQueryForm, kKvForm, kCausalKind, kDecomposable, kNormalization, kRanks };

constexpr TrtOperands kOperands = {.query_lengths = 4, .kv_lengths = 5, .y = 6};

// Order of the choices of the attributes below.
constexpr AttentionCausal kCausals[] = {AttentionCausal::kNone, AttentionCausal::kUpperLeft,
                                        AttentionCausal::kLowerRight};
constexpr AttentionNormalization kNormalizations[] = {AttentionNormalization::kSoftmax, AttentionNormalization::kNone};

OpSchema make_schema() {
  SchemaBuilder builder("trt_attention",
                        "softmax(Q K^T + attn_mask) V without any scale: TensorRT's TRT_Attention. A row with no "
                        "visible key gives 0, and so do packed rows past the last offset.");
  add_trt_inputs(builder, when("causal_kind", "none"));
  add_trt_lengths_and_output(builder);
  add_trt_forms(builder);
  builder.choice_attribute(
      "causal_kind",
      {{.name = "none", .number = {}}, {.name = "upper_left", .number = {}}, {.name = "lower_right", .number = {}}},
      "upper_left: row i sees keys up to i; lower_right: up to i + s_kv - s_q");
  add_trt_execution(builder);
  builder.int_attribute("nb_rank", 1, "devices that share the keys of a sequence", 1);
  add_trt_constraints(builder);
  return builder.build();
}

Status make_problem(const BoundCall& call, AttentionProblem* problem) {
  POLYOP_RETURN_IF_ERROR(check_trt_forms(call, kOperands));
  fill_trt_problem(call, kOperands, problem);
  const int64_t ranks = call.attributes[kRanks].integer;
  if (ranks > 1 && problem->query_form == AttentionQueryForm::kPacked) {
    return invalid_argument("trt_attention: attribute nb_rank is " + std::to_string(ranks) +
                            ", wanted 1 with packed_nhd");
  }
  if (ranks > 1) {
    return unsupported("trt_attention: attribute nb_rank is " + std::to_string(ranks) +
                       ", wanted 1: one device computes a call");
  }
  problem->causal = kCausals[call.attributes[kCausalKind].integer];
  problem->normalization = kNormalizations[call.attributes[kNormalization].integer];
  return Status::ok();
}

}  // namespace

std::unique_ptr<Operator> make_trt_attention_operator() {
  return std::make_unique<OperatorOver<AttentionProblem>>(make_schema(), make_problem, attention_kernels());
}

}  // namespace polyop
