// KvCacheUpdateProblem: one bound call of kv_cache_update; the only thing its kernels receive.
#pragma once

#include <string_view>

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

/// What an operator over store_tokens calls its kernel and the operands that may be flagged ("operator: operand").
struct CacheUpdateNames {
  std::string_view kernel;
  std::string_view offsets;
  std::string_view positions;
  std::string_view pages;  // counts with a page table
};

/// A warp for each token's share of heads, 16-byte accesses. Tokens outside the cache are skipped and, unless
/// skips_outside asks for it, flagged; so are negative write positions and pages outside the pool. Offsets that are no
/// cut of the tokens are flagged; what they make of the tokens stays inside the cache.
Status supports_store_tokens(const KvCacheUpdateProblem& problem);
Status store_tokens(const KvCacheUpdateProblem& problem, const CacheUpdateNames& names, Stream stream);

/// store_tokens under this operator's names.
Status kv_cache_update_tokens(const KvCacheUpdateProblem& problem, Workspace workspace, Stream stream);

}  // namespace cuda
}  // namespace polyop
