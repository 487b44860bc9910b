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

/// flash_attention with its products on AMX tiles, on processors that have them (see cpu/amx_attention.cpp).
Status supports_amx_attention(const AttentionProblem& problem);
int64_t amx_attention_workspace_bytes(const AttentionProblem& problem);
Status amx_attention(const AttentionProblem& problem, Workspace workspace, Stream stream);

/// Tiled attention in f32 on all threads (see cpu/flash_attention.cpp).
Status supports_flash_attention(const AttentionProblem& problem);
int64_t flash_attention_workspace_bytes(const AttentionProblem& problem);
Status flash_attention(const AttentionProblem& problem, Workspace workspace, Stream stream);

/// Attention over whole rows of scores: dense masks, tree masks, quantized weights, scores as weights
/// (see cpu/row_attention.cpp).
Status supports_row_attention(const AttentionProblem& problem);
int64_t row_attention_workspace_bytes(const AttentionProblem& problem);
Status row_attention(const AttentionProblem& problem, Workspace workspace, Stream stream);

}  // namespace cpu

namespace cuda {

/// Many query rows (trees, chunks, prefill) on sm_90, in one launch (see cuda/wgmma_kernel.cuh).
Status supports_wgmma(const AttentionProblem& problem);
int64_t wgmma_workspace_bytes(const AttentionProblem& problem);
Status wgmma(const AttentionProblem& problem, Workspace workspace, Stream stream);

/// Few query rows over long keys at the speed of memory, in one launch (see cuda/split_kv_kernel.cuh).
Status supports_split_kv(const AttentionProblem& problem);
int64_t split_kv_workspace_bytes(const AttentionProblem& problem);
Status split_kv(const AttentionProblem& problem, Workspace workspace, Stream stream);

/// Everything that AttentionProblem can say, at moderate speed (see cuda/attention_rows.cu).
Status supports_attention_rows(const AttentionProblem& problem);
Status attention_rows(const AttentionProblem& problem, Workspace workspace, Stream stream);

}  // namespace cuda
}  // namespace polyop
