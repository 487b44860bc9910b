// What the hosts of cuda_split_kv and cuda_wgmma share: what neither takes, and their plan's part that says where keys
// lie.
#pragma once

#include <cstdint>

#include "polyop/core/status.h"
#include "polyop/ops/attention/attention_problem.h"
#include "polyop/ops/attention/cuda/split_plan.cuh"

namespace polyop::cuda {

inline int64_t divide_up64(int64_t a, int64_t b) { return (a + b - 1) / b; }

/// Unsupported when the weights are not the softmax of masked-by-position scores.
Status supports_split_weights(const AttentionProblem& problem);

/// Unsupported when rows or keys are too many for 32 bits, or k and v lie differently.
Status supports_split_keys(const AttentionProblem& problem);

/// Distances of keys and pages.
void describe_keys(const AttentionProblem& problem, SplitPlan* plan);

}  // namespace polyop::cuda
