// trt_kv_cache_update_tokens: the cache copied to Y where that is other memory, then the update's rows.
// Math      Y[b, h, l, :] = past_cache[b, h, l, :], then the rows that kv_cache_update's kernel stores
// Shapes    past_cache, Y [B, Hkv, Lmax, D] f32, f16, bf16
// Layout    D dense; every other stride free; accesses as wide as addresses and strides allow, 16 bytes at most
// Work      a block copies kVectorsPerBlock vectors of neighbouring rows of one head, heads beyond the grid's second
//           extent in turns; dense caches are rows of one head
// Memory    each byte of the cache read once and written once; in place: nothing
// Roofline  bandwidth; 95 % of cudaMemcpyAsync's from 134 MB on, whose node in a graph takes half as long again from
//           512 MB on
// Numerics  copied bits
// Limits    those of the update, see supports_store_tokens
#include <cuda_runtime.h>

#include <algorithm>

#include "polyop/cuda/launch.h"
#include "polyop/cuda/vectors.cuh"
#include "polyop/ops/kv_cache_update/fronts/trt_kv_cache_update_problem.h"

namespace polyop::cuda {
namespace {

constexpr std::string_view kName = "trt_kv_cache_update: cuda_tokens";
constexpr int kThreads = 128;
constexpr int kVectorsPerThread = 4;  // all on their way at once
constexpr int64_t kVectorsPerBlock = kVectorsPerThread * kThreads;
constexpr int64_t kMostHeads = 65535;  // a grid's second extent

// ---- kernel ---------------------------------------------------------------------------------------------------------

/// Rows of past_cache and of Y; strides in bytes.
struct CacheRows {
  char* data = nullptr;
  int64_t sequence_stride = 0;
  int64_t head_stride = 0;
  int64_t row_stride = 0;
};

struct RowCopy {
  CacheRows from;
  CacheRows to;
  int64_t num_sequences = 0;
  int64_t num_heads = 0;
  int64_t num_rows = 0;
  int64_t rows_per_block = 1;
  int64_t row_bytes = 0;
};

// kBytes: of one access.
template <int kBytes>
__global__ void __launch_bounds__(kThreads) copy_rows_kernel(const __grid_constant__ RowCopy p) {
  const auto vectors = static_cast<uint32_t>(p.row_bytes / kBytes);
  const int64_t first_row = int64_t{blockIdx.x} * p.rows_per_block;
  const auto rows = static_cast<uint32_t>(min(p.rows_per_block, p.num_rows - first_row));
  for (int64_t plane = blockIdx.y; plane < p.num_sequences * p.num_heads; plane += gridDim.y) {
    const int64_t sequence = plane / p.num_heads;
    const int64_t head = plane - sequence * p.num_heads;
    const auto begin = [&](const CacheRows& rows_of) {
      return rows_of.data + sequence * rows_of.sequence_stride + head * rows_of.head_stride +
             first_row * rows_of.row_stride;
    };
    const char* from = begin(p.from);
    char* to = begin(p.to);
    for (uint32_t first = threadIdx.x; first < rows * vectors; first += kVectorsPerThread * kThreads) {
      Words<kBytes> data[kVectorsPerThread];
      const auto for_each = [&](auto&& fn) {
#pragma unroll
        for (int k = 0; k < kVectorsPerThread; ++k) {
          const uint32_t i = first + k * kThreads;
          if (i < rows * vectors) fn(data[k], i / vectors, int64_t{i % vectors} * kBytes);
        }
      };
      for_each([&](Words<kBytes>& words, uint32_t row, int64_t in_row) {
        words = load_words<kBytes>(from + row * p.from.row_stride + in_row);
      });
      for_each([&](const Words<kBytes>& words, uint32_t row, int64_t in_row) {
        *reinterpret_cast<Words<kBytes>*>(to + row * p.to.row_stride + in_row) = words;
      });
    }
  }
}

// ---- launch ---------------------------------------------------------------------------------------------------------

template <int kBytes>
void launch_copy(RowCopy p, Stream stream) {
  p.rows_per_block = std::max<int64_t>(1, kVectorsPerBlock / (p.row_bytes / kBytes));
  const dim3 blocks(static_cast<unsigned>((p.num_rows + p.rows_per_block - 1) / p.rows_per_block),
                    static_cast<unsigned>(std::min(p.num_sequences * p.num_heads, kMostHeads)));
  copy_rows_kernel<kBytes><<<blocks, kThreads, 0, stream_of(stream)>>>(p);
}

RowCopy row_copy(const TrtKvCacheUpdateProblem& problem) {
  const int64_t item = dtype_bytes(problem.update.cache_dtype);
  const KvCachePlane& result = problem.result();
  RowCopy p = {.from = {.data = static_cast<char*>(const_cast<void*>(problem.past_cache)),
                        .sequence_stride = problem.past_sequence_stride * item,
                        .head_stride = problem.past_head_stride * item,
                        .row_stride = problem.past_row_stride * item},
               .to = {.data = static_cast<char*>(result.cache),
                      .sequence_stride = result.page_stride * item,
                      .head_stride = result.cache_head_stride * item,
                      .row_stride = result.row_stride * item},
               .num_sequences = problem.num_sequences(),
               .num_heads = problem.update.num_kv_heads,
               .num_rows = problem.update.page_size,
               .row_bytes = problem.row_bytes()};
  if (problem.is_dense()) {
    p.num_rows *= p.num_sequences * p.num_heads;
    p.num_sequences = p.num_heads = 1;
    p.from = {.data = p.from.data, .row_stride = p.row_bytes};
    p.to = {.data = p.to.data, .row_stride = p.row_bytes};
  }
  return p;
}

Status copy_past(const TrtKvCacheUpdateProblem& problem, Stream stream) {
  if (problem.is_in_place() || problem.cache_bytes() == 0) return Status::ok();
  const RowCopy p = row_copy(problem);
  AccessWidth width;
  width.distance(p.row_bytes);
  for (const CacheRows& rows : {p.from, p.to}) {
    width.address(rows.data).distance(rows.sequence_stride).distance(rows.head_stride).distance(rows.row_stride);
  }
  switch (width.widest()) {
    case 16:
      launch_copy<16>(p, stream);
      break;
    case 8:
      launch_copy<8>(p, stream);
      break;
    case 4:
      launch_copy<4>(p, stream);
      break;
    default:
      launch_copy<2>(p, stream);
  }
  return launch_status(kName);
}

}  // namespace

Status supports_trt_kv_cache_update_tokens(const TrtKvCacheUpdateProblem& problem) {
  return supports_store_tokens(problem.update);
}

Status trt_kv_cache_update_tokens(const TrtKvCacheUpdateProblem& problem, Workspace, Stream stream) {
  POLYOP_RETURN_IF_ERROR(copy_past(problem, stream));
  return store_tokens(problem.update,
                      {.kernel = kName,
                       .offsets = "trt_kv_cache_update: update_lengths",
                       .positions = "trt_kv_cache_update: write_indices",
                       .pages = {}},
                      stream);
}

}  // namespace polyop::cuda
