// kv_cache_update_tokens: each token's keys and values go to their rows of the cache.
// Math      cache[page(b, position / R), position % R, h, :] = convert(update[t, h, :] / scale[h])
// Shapes    k, v [T, Hkv, D] or [B, S, Hkv, D] · caches [P, R, Hkv, D] or [B, Hkv, Lmax, D] · page_table [B, W] i32
// Layout    D dense; every other stride free; accesses as wide as addresses and strides allow, 16 bytes at most
// Work      one warp for a piece of up to kVectorsPerLane * 32 vectors of one token and plane: it reads its data first
//           and finds sequence, position and page while the data is on its way
// Memory    each byte of k and v read once, each byte of the cache rows written once
// Roofline  bandwidth: (bytes read + bytes written) / copy rate; target 92% of a plain copy; few tokens: three
// dependent
//           reads (offsets, position, page), about 2 us
// Numerics  copied bits, or one f32 division and one rounding to nearest even: equal to the reference
// Limits    none; tokens outside their sequence's capacity and pages outside the pool are skipped and flagged
#include <cuda_runtime.h>

#include <algorithm>
#include <type_traits>

#include "polyop/cuda/convert.cuh"
#include "polyop/cuda/error_flags.h"
#include "polyop/cuda/launch.h"
#include "polyop/cuda/ptx.cuh"
#include "polyop/cuda/ragged.cuh"
#include "polyop/cuda/vectors.cuh"
#include "polyop/ops/kv_cache_update/kv_cache_update_problem.h"

namespace polyop::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
constexpr int kVectorsPerLane = 4;
constexpr int kVectorsPerPiece = 32 * kVectorsPerLane;

struct Flags {
  ErrorFlag positions = nullptr;
  ErrorFlag pages = nullptr;
};

// ---- device helpers -------------------------------------------------------------------------------------------------

/// x / scale, correctly rounded: a reciprocal and one correction (Markstein) where neither over- nor underflows.
class Divisor {
 public:
  __device__ explicit Divisor(float scale) : scale_(scale) {
    reciprocal_ = __frcp_rn(scale);
    is_plain_ = fabsf(scale) > 0x1p-60f && fabsf(scale) < 0x1p60f;
  }

  [[nodiscard]] __device__ bool is_plain() const { return is_plain_; }

  template <bool kIsPlain>
  [[nodiscard]] __device__ float divide(float x) const {
    if constexpr (!kIsPlain) return __fdiv_rn(x, scale_);
    const float quotient = __fmul_rn(x, reciprocal_);
    const float corrected = fmaf(fmaf(-quotient, scale_, x), reciprocal_, quotient);
    // Infinities have no remainder. Below 2^-60 it may be rounded: all such quotients store as 0.
    return fabsf(quotient) < 0x1p60f ? corrected : quotient;
  }

 private:
  float scale_ = 1.0f;
  float reciprocal_ = 1.0f;
  bool is_plain_ = true;
};

/// Two values as from_float rounds them, in one conversion.
template <class Cache>
__device__ Vector<Cache, 2> from_floats(float first, float second) {
  Vector<Cache, 2> pair;
  if constexpr (std::is_same_v<Cache, Fp8>) {
    const __nv_fp8x2_storage_t bits = __nv_cvt_float2_to_fp8x2({first, second}, __NV_SATFINITE, __NV_E4M3);
    pair.values[0].bits = static_cast<uint8_t>(bits & 0xff);
    pair.values[1].bits = static_cast<uint8_t>(bits >> 8);
  } else {
    pair.values[0] = round_to_int8(first);
    pair.values[1] = round_to_int8(second);
  }
  return pair;
}

/// data / scale, rounded. kIsPlain: as the divisor says; once for a vector, so that its elements share no branches.
template <bool kIsPlain, class Cache, class Update, int kWidth>
__device__ Vector<Cache, kWidth> quantize(const Vector<Update, kWidth>& data, const Divisor& divisor) {
  Vector<Cache, kWidth> stored;
  if constexpr (kWidth % 2 == 0) {
#pragma unroll
    for (int j = 0; j < kWidth; j += 2) {
      const auto pair = from_floats<Cache>(divisor.divide<kIsPlain>(to_float(data.values[j])),
                                           divisor.divide<kIsPlain>(to_float(data.values[j + 1])));
      *reinterpret_cast<Vector<Cache, 2>*>(&stored.values[j]) = pair;
    }
  } else {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      stored.values[j] = from_float<Cache>(divisor.divide<kIsPlain>(to_float(data.values[j])));
    }
  }
  return stored;
}

/// Where a token's row stands in the cache.
struct CacheRow {
  int64_t page = 0;
  int64_t row = 0;
  bool valid = false;
};

__device__ void raise(ErrorFlag flag) {
  if (flag != nullptr) *flag = 1;
}

__device__ CacheRow find_row(const KvCacheUpdateProblem& p, const Flags& flags, int64_t token) {
  int64_t sequence = 0;
  int64_t index = 0;  // of the token in its sequence
  if (p.is_packed()) {
    sequence = find_sequence(p.update_offsets, p.num_sequences, token);
    if (sequence < 0) return {};
    index = token - p.update_offsets[sequence];
  } else {
    sequence = token / p.padded_tokens;
    index = token - sequence * p.padded_tokens;
  }
  const int64_t start = p.write_position(sequence);
  const int64_t position = start + index;
  if (start < 0 || position >= p.capacity) {
    raise(flags.positions);
    return {};
  }
  const int64_t column = position / p.page_size;
  const int64_t page = p.page(sequence, column);
  if (page < 0 || page >= p.num_pages) {
    raise(flags.pages);
    return {};
  }
  return {.page = page, .row = position - column * p.page_size, .valid = true};
}

// ---- kernel ---------------------------------------------------------------------------------------------------------

// Update: element type of k and v (a plain word when bits are copied); Cache: that of the cache.
template <class Update, class Cache, int kWidth>
__global__ void __launch_bounds__(kThreads)
    kv_cache_update_kernel(const KvCacheUpdateProblem p, const Flags flags, int64_t pieces_per_token) {
  constexpr bool kQuantizes = !std::is_same_v<Update, Cache>;
  const int lane = threadIdx.x % 32;
  const int64_t vectors_per_head = p.head_dim / kWidth;
  const int64_t vectors_per_plane = p.num_kv_heads * vectors_per_head;
  const int64_t num_pieces = p.num_tokens * pieces_per_token * p.num_planes;
  const int64_t stride = int64_t{gridDim.x} * kWarps;
  for (int64_t piece = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32; piece < num_pieces; piece += stride) {
    const int64_t token_plane = piece / pieces_per_token;
    const int64_t token = token_plane / p.num_planes;
    const KvCachePlane& plane = p.planes[token_plane - token * p.num_planes];
    const int64_t first = (piece - token_plane * pieces_per_token) * kVectorsPerPiece + lane;
    int64_t from = token * plane.update_token_stride;
    if (!p.is_packed()) {
      const int64_t sequence = token / p.padded_tokens;
      from = sequence * plane.update_sequence_stride + (token - sequence * p.padded_tokens) * plane.update_token_stride;
    }
    Vector<Update, kWidth> data[kVectorsPerLane];
    int32_t head[kVectorsPerLane];
    int32_t channel[kVectorsPerLane];
#pragma unroll
    for (int i = 0; i < kVectorsPerLane; ++i) {
      const int64_t vector = first + i * 32;
      if (vector >= vectors_per_plane) break;
      head[i] = static_cast<int32_t>(static_cast<uint32_t>(vector) / static_cast<uint32_t>(vectors_per_head));
      channel[i] = static_cast<int32_t>(vector - head[i] * vectors_per_head) * kWidth;
      data[i] = load_streaming<Update, kWidth>(static_cast<const Update*>(plane.update) + from +
                                               head[i] * plane.update_head_stride + channel[i]);
    }
    const CacheRow row = find_row(p, flags, token);
    if (!row.valid) continue;
    Cache* to = static_cast<Cache*>(plane.cache) + row.page * plane.page_stride + row.row * plane.row_stride;
#pragma unroll
    for (int i = 0; i < kVectorsPerLane; ++i) {
      if (first + i * 32 >= vectors_per_plane) break;
      Cache* address = to + head[i] * plane.cache_head_stride + channel[i];
      if constexpr (kQuantizes) {
        const Divisor divisor(plane.scale == nullptr ? 1.0f : plane.scale[head[i] * plane.scale_stride]);
        const Vector<Cache, kWidth> stored =
            divisor.is_plain() ? quantize<true, Cache>(data[i], divisor) : quantize<false, Cache>(data[i], divisor);
        store_vector(address, stored);
      } else {
        store_vector(address, data[i]);
      }
    }
  }
}

// ---- launch ---------------------------------------------------------------------------------------------------------

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

template <class Update, class Cache, int kWidth>
Status launch_width(const KvCacheUpdateProblem& p, Stream stream) {
  const Flags flags = {.positions = error_flag("kv_cache_update: write_positions"),
                       .pages = error_flag("kv_cache_update: page_table")};
  const int64_t vectors = p.num_kv_heads * (p.head_dim / kWidth);
  const int64_t pieces = (vectors + kVectorsPerPiece - 1) / kVectorsPerPiece;
  const int64_t blocks = blocks_for(p.num_tokens * pieces * p.num_planes, kWarps, int64_t{1} << 30);
  kv_cache_update_kernel<Update, Cache, kWidth>
      <<<static_cast<unsigned>(blocks), kThreads, 0, stream_of(stream)>>>(p, flags, pieces);
  return launch_status("kv_cache_update: cuda_tokens");
}

template <class Update, class Cache>
Status launch(const KvCacheUpdateProblem& p, Stream stream) {
  constexpr int kWidest = 16 / sizeof(Update);
  const int width = access_width(p);
  if (width >= kWidest) return launch_width<Update, Cache, kWidest>(p, stream);
  if (width >= 2) return launch_width<Update, Cache, 2>(p, stream);
  return launch_width<Update, Cache, 1>(p, stream);
}

template <class Update>
Status launch_quantizing(const KvCacheUpdateProblem& p, Stream stream) {
  return p.cache_dtype == DType::kI8 ? launch<Update, int8_t>(p, stream) : launch<Update, Fp8>(p, stream);
}

}  // namespace

Status kv_cache_update_tokens(const KvCacheUpdateProblem& problem, Workspace, Stream stream) {
  if (problem.num_tokens == 0 || problem.num_kv_heads == 0 || problem.head_dim == 0) return Status::ok();
  if (problem.num_sequences == 0) return Status::ok();
  if (problem.quantizes()) {
    switch (problem.update_dtype) {
      case DType::kF32:
        return launch_quantizing<float>(problem, stream);
      case DType::kF16:
        return launch_quantizing<__half>(problem, stream);
      default:
        return launch_quantizing<__nv_bfloat16>(problem, stream);
    }
  }
  return dtype_bytes(problem.update_dtype) == 4 ? launch<uint32_t, uint32_t>(problem, stream)
                                                : launch<uint16_t, uint16_t>(problem, stream);
}

}  // namespace polyop::cuda
