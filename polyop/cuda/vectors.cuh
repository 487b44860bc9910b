// Vector accesses: up to 16 bytes a thread, and the widest access that pointers and strides allow.
#pragma once

#include <cstdint>
#include <type_traits>

namespace polyop::cuda {

/// kCount elements of T that move as one access.
template <class T, int kCount>
struct alignas(sizeof(T) * kCount) Vector {
  T values[kCount];
};

/// kBytes (1, 2, 4, 8 or 16) as plain words: what waits in registers, where vectors of small elements would be split.
template <int kBytes>
using Words = std::conditional_t<
    kBytes == 16, uint4,
    std::conditional_t<kBytes == 8, uint2,
                       std::conditional_t<kBytes == 4, uint32_t, std::conditional_t<kBytes == 2, uint16_t, uint8_t>>>>;

/// One access for data that is used once and need not stay in the first-level cache.
template <int kBytes>
__device__ inline Words<kBytes> load_words(const void* address) {
  return __ldcs(static_cast<const Words<kBytes>*>(address));
}

/// Collects addresses and distances in bytes; `widest` is the largest power of two, at most 16, that divides them all.
class AccessWidth {
 public:
  AccessWidth& address(const void* pointer) {
    return distance(static_cast<int64_t>(reinterpret_cast<uintptr_t>(pointer)));
  }
  AccessWidth& distance(int64_t bytes) {
    bits_ |= static_cast<uint64_t>(bytes);
    return *this;
  }
  [[nodiscard]] int widest() const {
    const uint64_t all = bits_ | 16;
    return static_cast<int>(all & (~all + 1));
  }

 private:
  uint64_t bits_ = 0;
};

}  // namespace polyop::cuda
