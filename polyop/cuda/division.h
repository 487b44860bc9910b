// Divisions of integers that are not negative, in fewer instructions than the twenty of `/`.
#pragma once

#include <bit>
#include <cstdint>

#ifdef __CUDACC__
#define POLYOP_HOST_DEVICE __host__ __device__
#else
#define POLYOP_HOST_DEVICE
#endif

namespace polyop::cuda {

/// A divisor that the host knows, from 1 on. After Granlund and Montgomery, "Division by invariant integers using
/// multiplication" (1994): n / d = (n m) >> (32 + s) for n < 2^31, m = ceil(2^(32 + s) / d), s = floor(log2(d - 1)).
class FixedDivisor {
 public:
  FixedDivisor() = default;
  explicit FixedDivisor(int32_t divisor) {
    if (divisor <= 1) return;
    shift_ = static_cast<int32_t>(std::bit_width(static_cast<uint32_t>(divisor - 1))) - 1;
    factor_ = static_cast<uint32_t>(((uint64_t{1} << (32 + shift_)) + static_cast<uint64_t>(divisor) - 1) /
                                    static_cast<uint64_t>(divisor));
  }

  /// n / divisor, rounded down.
  [[nodiscard]] POLYOP_HOST_DEVICE int32_t quotient(int32_t n) const {
    const uint64_t product = static_cast<uint64_t>(static_cast<uint32_t>(n)) * factor_;
    return factor_ == 0 ? n : static_cast<int32_t>(static_cast<uint32_t>(product >> 32) >> shift_);
  }

  /// (n + divisor - 1) / divisor of `n` and the divisor itself, together below 2^31.
  [[nodiscard]] POLYOP_HOST_DEVICE int32_t quotient_up(int32_t n, int32_t divisor) const {
    return quotient(n + divisor - 1);
  }

 private:
  uint32_t factor_ = 0;  // 0: the divisor is 1
  int32_t shift_ = 0;
};

#ifdef __CUDACC__
/// A divisor of at least 2 that only the device knows, for small numbers.
class SmallDivisor {
 public:
  __device__ explicit SmallDivisor(uint32_t divisor) : reciprocal_(0xffffffffu / divisor + 1) {}
  /// Exact while number * divisor is below 2^32.
  [[nodiscard]] __device__ uint32_t quotient(uint32_t number) const { return __umulhi(number, reciprocal_); }

 private:
  uint32_t reciprocal_;
};

/// a / b, rounded down, of quotients below 2^20: that of floats is off by less than 1 either way.
[[nodiscard]] __device__ inline int32_t small_quotient(int32_t a, int32_t b) {
  const auto estimate = static_cast<int32_t>(__fdividef(static_cast<float>(a), static_cast<float>(b)));
  const int32_t rest = a - estimate * b;
  return estimate + (rest >= b ? 1 : 0) - (rest < 0 ? 1 : 0);
}
#endif

}  // namespace polyop::cuda
