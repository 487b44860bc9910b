// Vector accesses: up to 16 bytes a thread, and the widest access that pointers and strides allow.
#pragma once

#include <cstdint>

namespace polyop::cuda {

/// kCount elements of T that move as one access.
template <class T, int kCount>
struct alignas(sizeof(T) * kCount) Vector {
  T values[kCount];
};

/// One access for data that is used once and need not stay in the first-level cache.
template <class T, int kCount>
__device__ inline Vector<T, kCount> load_streaming(const T* address) {
  constexpr int kBytes = sizeof(T) * kCount;
  Vector<T, kCount> result;
  if constexpr (kBytes == 16) {
    const uint4 word = __ldcs(reinterpret_cast<const uint4*>(address));
    *reinterpret_cast<uint4*>(&result) = word;
  } else {
    result = *reinterpret_cast<const Vector<T, kCount>*>(address);
  }
  return result;
}

template <class T, int kCount>
__device__ inline void store_vector(T* address, const Vector<T, kCount>& value) {
  *reinterpret_cast<Vector<T, kCount>*>(address) = value;
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
