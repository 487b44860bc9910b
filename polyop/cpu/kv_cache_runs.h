// Appending to a KV cache in runs: consecutive rows within one page.
#pragma once

#include <algorithm>
#include <cstdint>

#include "polyop/core/kv_cache_append.h"

namespace polyop::cpu {

/// Consecutive tokens of one sequence that go to consecutive rows of one page.
struct KvCacheRun {
  int64_t sequence;
  int64_t token;
  int64_t tokens;
  int64_t page;
  int64_t row;
};

/// The sequence that token `token` of the whole batch belongs to.
inline int64_t sequence_of_token(const KvCacheAppend& append, int64_t token) {
  if (!append.is_packed()) return token / append.padded_tokens;
  const int32_t* offsets = append.update_offsets;
  return std::upper_bound(offsets, offsets + append.num_sequences + 1, token) - offsets - 1;
}

/// Calls fn(run) for the runs that tokens [begin, end) of the whole batch make up, in order.
template <class Fn>
void for_each_run(const KvCacheAppend& append, int64_t begin, int64_t end, Fn&& fn) {
  for (int64_t sequence = sequence_of_token(append, begin); begin < end; ++sequence) {
    const int64_t sequence_begin = append.token_offset(sequence);
    const int64_t next_sequence = std::min(end, append.token_offset(sequence + 1));
    const auto [first_stored, stored_end] = append.stored_tokens(sequence);
    begin = std::max(begin, sequence_begin + first_stored);
    const int64_t sequence_end = std::min(next_sequence, sequence_begin + stored_end);
    while (begin < sequence_end) {
      const int64_t position = append.write_position(sequence) + begin - sequence_begin;
      const int64_t column = position / append.page_size;
      const int64_t row = position - column * append.page_size;
      const int64_t tokens = std::min(append.page_size - row, sequence_end - begin);
      fn(KvCacheRun{.sequence = sequence,
                    .token = begin - sequence_begin,
                    .tokens = tokens,
                    .page = append.page(sequence, column),
                    .row = row});
      begin += tokens;
    }
    begin = next_sequence;
  }
}

/// Stores the rows of one run of keys or values: copied as bytes, NaN payloads too, or quantized as quantize_rows does.
void store_run(const KvCacheAppend& append, const KvCachePlane& plane, const KvCacheRun& run);

}  // namespace polyop::cpu
