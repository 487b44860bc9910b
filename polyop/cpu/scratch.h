// ScratchCutter: arrays inside the scratch memory of one thread.
#pragma once

#include <cstddef>
#include <cstdint>

#include "polyop/core/kernel_list.h"

namespace polyop::cpu {

/// Cuts memory into arrays, each aligned to kWorkspaceAlignment. Without memory it counts: the same function of a
/// kernel says how much it needs and, later, where everything lies.
class ScratchCutter {
 public:
  explicit ScratchCutter(void* memory = nullptr) : memory_(static_cast<std::byte*>(memory)) {}

  /// `count` elements, not initialized; null when counting.
  template <class T>
  T* take(int64_t count) {
    auto* array = memory_ == nullptr ? nullptr : reinterpret_cast<T*>(memory_ + bytes_);
    const int64_t bytes = count * static_cast<int64_t>(sizeof(T));
    bytes_ += (bytes + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
    return array;
  }

  /// Bytes taken so far, a multiple of kWorkspaceAlignment.
  [[nodiscard]] int64_t bytes() const { return bytes_; }

 private:
  std::byte* memory_;
  int64_t bytes_ = 0;
};

}  // namespace polyop::cpu
