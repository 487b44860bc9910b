// KvCacheUpdateProblem: one bound call of kv_cache_update; the only thing its kernels receive.
#pragma once

#include "polyop/core/kernel_list.h"
#include "polyop/core/kv_cache_append.h"

namespace polyop {

using KvCacheUpdateProblem = KvCacheAppend;

/// Token by token and element by element; the specification in code.
Status kv_cache_update_reference(const KvCacheUpdateProblem& problem, Workspace workspace, Stream stream);

namespace cpu {

/// Runs of rows that lie in one page, with all threads: copied as bytes, or quantized in vectors.
Status kv_cache_update_runs(const KvCacheUpdateProblem& problem, Workspace workspace, Stream stream);

}  // namespace cpu

namespace cuda {

/// A warp for each token's share of heads, 16-byte accesses; takes every call. Tokens outside the cache and pages
/// outside the pool are skipped and flagged.
Status kv_cache_update_tokens(const KvCacheUpdateProblem& problem, Workspace workspace, Stream stream);

}  // namespace cuda
}  // namespace polyop
