// The implementations of attention, in the order they are tried.
#pragma once

#include <span>

#include "polyop/core/kernel_list.h"
#include "polyop/ops/attention/attention_problem.h"

namespace polyop {

/// All kernels; the reference is the last one on the CPU and takes every problem.
std::span<const Kernel<AttentionProblem>> attention_kernels();

/// Slow, obvious, sums in double, on one thread. Takes everything that AttentionProblem can say.
int64_t attention_reference_workspace_bytes(const AttentionProblem& problem);
Status attention_reference(const AttentionProblem& problem, Workspace workspace, Stream stream);

namespace cpu {

/// Tiled attention in f32 on all threads (see cpu/flash_attention.cpp).
Status supports_flash_attention(const AttentionProblem& problem);
int64_t flash_attention_workspace_bytes(const AttentionProblem& problem);
Status flash_attention(const AttentionProblem& problem, Workspace workspace, Stream stream);

}  // namespace cpu
}  // namespace polyop
