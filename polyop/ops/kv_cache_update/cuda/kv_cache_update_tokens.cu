// kv_cache_update_tokens: each token's keys and values go to their rows of the cache.
// Math      cache[page(b, position / R), position % R, h, :] = convert(update[t, h, :] / scale[h])
// Shapes    k, v [T, Hkv, D] or [B, S, Hkv, D] · caches [P, R, Hkv, D] or [B, Hkv, Lmax, D] · page_table [B, W] i32
// Layout    D dense; every other stride free; accesses as wide as addresses and strides allow, 16 bytes at most
// Work      one warp for a piece of up to kVectorsPerLane * 32 vectors of a token's keys and values: it reads its data
//           first and finds sequence, position and page while the data is on its way
// Memory    each byte of k and v read once, each byte of the cache rows written once
// Roofline  bandwidth: (bytes read + bytes written) / copy rate; target 92% of a plain copy, see docs/performance.md;
//           few tokens: two dependent reads (offsets and positions, page), about 2 us
// Numerics  copied bits, or one f32 division and one rounding to nearest even: equal to the reference
// Limits    i32 numbers of tokens and vectors; tokens outside their sequence's capacity and pages outside the pool are
//           skipped and flagged; under offsets that are no cut of the tokens, which are flagged, rows are stored where
//           they fit
#include <cuda_runtime.h>

#include <algorithm>
#include <limits>
#include <string>
#include <type_traits>

#include "polyop/cuda/error_flags.h"
#include "polyop/cuda/kv_cache_rows.cuh"
#include "polyop/cuda/launch.h"
#include "polyop/cuda/vectors.cuh"
#include "polyop/ops/kv_cache_update/kv_cache_update_problem.h"

namespace polyop::cuda {
namespace {

constexpr int kWarps = 2;  // small blocks make room for the next as soon as their tokens are done
constexpr int kThreads = 32 * kWarps;
constexpr int kVectorsPerLane = 8;  // all on their way at once
constexpr int kVectorsPerPiece = 32 * kVectorsPerLane;

// ---- kernel ---------------------------------------------------------------------------------------------------------

/// One vector of a token: the lane's next is 32 vectors further. Heads count through both planes. kJoined: a plane has
/// one head.
template <int kWidth, bool kJoined>
class VectorPlace {
 public:
  __device__ VectorPlace(const KvCacheUpdateProblem& p, int32_t vector) : vector_(vector) {
    vectors_per_head_ = static_cast<int32_t>(p.head_dim) / kWidth;
    if constexpr (kJoined) {
      num_heads_ = 1;
      head_ = vector >= vectors_per_head_ ? 1 : 0;
      heads_a_step_ = 0;
      vectors_a_step_ = 32;
    } else {
      num_heads_ = static_cast<int32_t>(p.num_kv_heads);
      head_ = vector / vectors_per_head_;
      heads_a_step_ = 32 / vectors_per_head_;
      vectors_a_step_ = 32 - heads_a_step_ * vectors_per_head_;
    }
    vector_ -= head_ * vectors_per_head_;
  }

  __device__ void step() {
    head_ += heads_a_step_;
    vector_ += vectors_a_step_;
    if (vector_ >= vectors_per_head_) {
      vector_ -= vectors_per_head_;
      ++head_;
    }
  }

  [[nodiscard]] __device__ bool is_value() const { return head_ >= num_heads_; }  // of the second plane
  [[nodiscard]] __device__ int32_t channel() const { return vector_ * kWidth; }
  /// Among those of its plane.
  [[nodiscard]] __device__ int32_t head() const { return kJoined ? 0 : is_value() ? head_ - num_heads_ : head_; }

 private:
  int32_t vectors_per_head_;
  int32_t num_heads_;
  int32_t heads_a_step_;
  int32_t vectors_a_step_;
  int32_t head_;
  int32_t vector_;  // in its head
};

/// Quantizes what lies in `words`.
template <class Update, class Cache, int kWidth>
__device__ Words<kWidth> quantize_words(const Words<kWidth * sizeof(Update)>& words, const Divisor& divisor) {
  float values[kWidth];
  if constexpr (kWidth * sizeof(Update) == 16) {
    to_floats<Update>(words, values);
  } else {
    const auto& elements = reinterpret_cast<const Vector<Update, kWidth>&>(words);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) values[j] = to_float(elements.values[j]);
  }
  return quantize<Cache>(values, divisor);
}

// Update: element type of k and v (a plain word when bits are copied); Cache: that of the cache.
template <class Update, class Cache, int kWidth, bool kJoined>
__global__ void __launch_bounds__(kThreads)
    kv_cache_update_kernel(const __grid_constant__ KvCacheUpdateProblem p, const CacheFlags flags) {
  constexpr bool kQuantizes = !std::is_same_v<Update, Cache>;
  constexpr int kBytes = kWidth * static_cast<int>(sizeof(Update));
  const auto token = static_cast<int32_t>(blockIdx.x * kWarps + threadIdx.x / 32);
  if (token >= p.num_tokens) {
    if (token == p.num_tokens && blockIdx.y == 0) check_offsets(p, flags);
    return;
  }
  const auto vectors = static_cast<int32_t>(p.num_planes * p.num_kv_heads * (p.head_dim / kWidth));
  const auto first = static_cast<int32_t>(blockIdx.y * kVectorsPerPiece + threadIdx.x % 32);
  const VectorPlace<kWidth, kJoined> begin(p, first);
  int32_t sequence = 0;
  int32_t row = token;
  if (!p.is_packed()) {
    sequence = static_cast<int32_t>(static_cast<uint32_t>(token) / static_cast<uint32_t>(p.padded_tokens));
    row -= sequence * static_cast<int32_t>(p.padded_tokens);
  }
  const Update* from[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const KvCachePlane& plane = p.planes[i];
    from[i] = static_cast<const Update*>(plane.update) + sequence * plane.update_sequence_stride +
              row * plane.update_token_stride;
  }
  Words<kBytes> data[kVectorsPerLane];
  VectorPlace<kWidth, kJoined> at = begin;
#pragma unroll
  for (int i = 0; i < kVectorsPerLane; ++i, at.step()) {
    if (first + i * 32 >= vectors) break;
    const int64_t head_stride = p.planes[at.is_value() ? 1 : 0].update_head_stride;
    data[i] = load_words<kBytes>((at.is_value() ? from[1] : from[0]) + at.head() * head_stride + at.channel());
  }
  Divisor divisors[2] = {Divisor(1.0f), Divisor(1.0f)};
  if constexpr (kQuantizes && kJoined) {
    divisors[0] = Divisor(kv_cache_scale(p.planes[0], 0));
    divisors[1] = Divisor(kv_cache_scale(p.planes[1], 0));
  }
  // The data is on its way while the row is looked up.
  const TokenOwner owner = find_owner(p, token);
  if (owner.sequence < 0) return;
  const CacheRow place = find_cache_row(p, flags, owner);
  if (!place.valid) return;
  Cache* to[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const KvCachePlane& plane = p.planes[i];
    to[i] = static_cast<Cache*>(plane.cache) + place.page * plane.page_stride + place.row * plane.row_stride;
  }
  at = begin;
#pragma unroll
  for (int i = 0; i < kVectorsPerLane; ++i, at.step()) {
    if (first + i * 32 >= vectors) break;
    const KvCachePlane& plane = p.planes[at.is_value() ? 1 : 0];
    Cache* address = (at.is_value() ? to[1] : to[0]) + at.head() * plane.cache_head_stride + at.channel();
    if constexpr (kQuantizes) {
      Divisor divisor = at.is_value() ? divisors[1] : divisors[0];
      if constexpr (!kJoined) divisor = Divisor(kv_cache_scale(plane, at.head()));
      *reinterpret_cast<Words<kWidth>*>(address) = quantize_words<Update, Cache, kWidth>(data[i], divisor);
    } else {
      *reinterpret_cast<Words<kBytes>*>(address) = data[i];
    }
  }
}

// ---- launch ---------------------------------------------------------------------------------------------------------

/// True when heads lie side by side everywhere and share a scale: then they are one long head.
bool joins_heads(const KvCacheUpdateProblem& p) {
  for (int32_t i = 0; i < p.num_planes; ++i) {
    const KvCachePlane& plane = p.planes[i];
    const bool shares_scale = plane.scale == nullptr || plane.scale_stride == 0;
    if (plane.update_head_stride != p.head_dim || plane.cache_head_stride != p.head_dim || !shares_scale) return false;
  }
  return true;
}

KvCacheUpdateProblem join_heads(const KvCacheUpdateProblem& problem) {
  KvCacheUpdateProblem p = problem;
  p.head_dim *= p.num_kv_heads;
  p.num_kv_heads = 1;
  return p;
}

/// Elements one access moves: bounded by 16 bytes and by what all addresses and distances of both sides divide.
int access_width(const KvCacheUpdateProblem& p) {
  const int64_t update_bytes = dtype_bytes(p.update_dtype);
  const int64_t cache_bytes = dtype_bytes(p.cache_dtype);
  AccessWidth update;
  AccessWidth cache;
  update.distance(p.head_dim * update_bytes);
  cache.distance(p.head_dim * cache_bytes);
  for (int32_t i = 0; i < p.num_planes; ++i) {
    const KvCachePlane& plane = p.planes[i];
    update.address(plane.update)
        .distance(plane.update_sequence_stride * update_bytes)
        .distance(plane.update_token_stride * update_bytes)
        .distance(plane.update_head_stride * update_bytes);
    cache.address(plane.cache)
        .distance(plane.page_stride * cache_bytes)
        .distance(plane.row_stride * cache_bytes)
        .distance(plane.cache_head_stride * cache_bytes);
  }
  return static_cast<int>(std::min(update.widest() / update_bytes, cache.widest() / cache_bytes));
}

template <class Update, class Cache, int kWidth, bool kJoined>
Status launch_width(const KvCacheUpdateProblem& p, const CacheUpdateNames& names, Stream stream) {
  const CacheFlags flags = {.offsets = error_flag(names.offsets),
                            .positions = error_flag(names.positions),
                            .pages = p.page_table == nullptr ? nullptr : error_flag(names.pages)};
  const int64_t vectors = p.num_planes * p.num_kv_heads * (p.head_dim / kWidth);
  const dim3 blocks(static_cast<unsigned>(p.num_tokens / kWarps + 1),
                    static_cast<unsigned>((vectors + kVectorsPerPiece - 1) / kVectorsPerPiece));
  kv_cache_update_kernel<Update, Cache, kWidth, kJoined><<<blocks, kThreads, 0, stream_of(stream)>>>(p, flags);
  return launch_status(names.kernel);
}

template <class Update, class Cache>
Status launch(const KvCacheUpdateProblem& p, const CacheUpdateNames& names, Stream stream) {
  constexpr int kWidest = 16 / sizeof(Update);
  const int width = access_width(p);
  if (width >= kWidest) {
    const bool joined = joins_heads(p);
    return joined ? launch_width<Update, Cache, kWidest, true>(join_heads(p), names, stream)
                  : launch_width<Update, Cache, kWidest, false>(p, names, stream);
  }
  if (width >= 2) return launch_width<Update, Cache, 2, false>(p, names, stream);
  return launch_width<Update, Cache, 1, false>(p, names, stream);
}

template <class Update>
Status launch_quantizing(const KvCacheUpdateProblem& p, const CacheUpdateNames& names, Stream stream) {
  return p.cache_dtype == DType::kI8 ? launch<Update, int8_t>(p, names, stream) : launch<Update, Fp8>(p, names, stream);
}

}  // namespace

Status supports_store_tokens(const KvCacheUpdateProblem& problem) {
  constexpr int64_t kMostTokens = std::numeric_limits<int32_t>::max() - kThreads;  // a token's number is an i32
  constexpr int64_t kMostElements = int64_t{65535} * kVectorsPerPiece;             // a grid's second extent
  if (problem.num_tokens > kMostTokens) {
    return unsupported("the update has " + std::to_string(problem.num_tokens) + " tokens, at most " +
                       std::to_string(kMostTokens) + " are taken");
  }
  if (problem.num_planes * problem.num_kv_heads * problem.head_dim > kMostElements) {
    return unsupported("a token has more than " + std::to_string(kMostElements) + " elements");
  }
  return Status::ok();
}

Status store_tokens(const KvCacheUpdateProblem& problem, const CacheUpdateNames& names, Stream stream) {
  if (problem.num_kv_heads == 0 || problem.head_dim == 0 || problem.num_sequences == 0) return Status::ok();
  // Without tokens there are still offsets to check.
  if (problem.num_tokens == 0 && !problem.is_packed()) return Status::ok();
  if (problem.quantizes()) {
    switch (problem.update_dtype) {
      case DType::kF32:
        return launch_quantizing<float>(problem, names, stream);
      case DType::kF16:
        return launch_quantizing<__half>(problem, names, stream);
      default:
        return launch_quantizing<__nv_bfloat16>(problem, names, stream);
    }
  }
  return dtype_bytes(problem.update_dtype) == 4 ? launch<uint32_t, uint32_t>(problem, names, stream)
                                                : launch<uint16_t, uint16_t>(problem, names, stream);
}

Status kv_cache_update_tokens(const KvCacheUpdateProblem& problem, Workspace, Stream stream) {
  return store_tokens(problem,
                      {.kernel = "kv_cache_update: cuda_tokens",
                       .offsets = "kv_cache_update: update_offsets",
                       .positions = "kv_cache_update: write_positions",
                       .pages = "kv_cache_update: page_table"},
                      stream);
}

}  // namespace polyop::cuda
