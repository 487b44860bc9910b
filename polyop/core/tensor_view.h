// TensorView: a borrowed, strided view of memory. It never owns; whoever calls an operator keeps the memory alive.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>

#include "polyop/core/dtype.h"

namespace polyop {

inline constexpr int kMaxRank = 8;

enum class DeviceType : uint8_t { kCpu, kCuda };

struct Device {
  DeviceType type = DeviceType::kCpu;
  int32_t index = 0;

  friend bool operator==(const Device&, const Device&) = default;
};

/// Pointer, dtype, device, extents and strides (in elements, outermost first). An extent of zero is legal; its data
/// pointer may then be null.
struct TensorView {
  void* data = nullptr;
  DType dtype = DType::kF32;
  Device device;
  int32_t rank = 0;
  std::array<int64_t, kMaxRank> shape{};
  std::array<int64_t, kMaxRank> strides{};

  /// A contiguous view: `strides` follow from `shape`, last axis fastest.
  static TensorView contiguous(void* data, DType dtype, std::initializer_list<int64_t> shape, Device device = {}) {
    return contiguous(data, dtype, shape.begin(), static_cast<int32_t>(shape.size()), device);
  }
  static TensorView contiguous(void* data, DType dtype, const int64_t* shape, int32_t rank, Device device = {}) {
    TensorView view{.data = data, .dtype = dtype, .device = device, .rank = rank, .shape = {}, .strides = {}};
    int64_t stride = 1;
    for (int32_t axis = rank - 1; axis >= 0; --axis) {
      view.shape[axis] = shape[axis];
      view.strides[axis] = stride;
      stride *= shape[axis];
    }
    return view;
  }

  [[nodiscard]] int64_t num_elements() const {
    int64_t count = 1;
    for (int32_t axis = 0; axis < rank; ++axis) count *= shape[axis];
    return count;
  }

  /// True when walking the elements in row-major order walks memory without gaps; axes of extent 1 do not count.
  [[nodiscard]] bool is_contiguous() const {
    if (num_elements() == 0) return true;
    int64_t expected = 1;
    for (int32_t axis = rank - 1; axis >= 0; --axis) {
      if (shape[axis] != 1 && strides[axis] != expected) return false;
      expected *= shape[axis];
    }
    return true;
  }
};

}  // namespace polyop
