// GuardedTensor: a strided tensor in memory of its own, with sentinels before it, after it and in every gap.
#pragma once

#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <random>
#include <vector>

#include "polyop/core/numeric_types.h"
#include "polyop/core/tensor_view.h"

namespace polyop::testing {

class GuardedTensor {
 public:
  static constexpr uint8_t kSentinel = 0xa5;

  /// `pitch_gaps`: unused elements behind each extent when stepping along the axis before it (as a column view has
  /// them); empty: contiguous.
  GuardedTensor(DType dtype, std::vector<int64_t> shape, std::vector<int64_t> pitch_gaps = {}) {
    view_.dtype = dtype;
    view_.rank = static_cast<int32_t>(shape.size());
    int64_t elements = 1;
    for (int axis = view_.rank - 1; axis >= 0; --axis) {
      view_.shape[axis] = shape[axis];
      view_.strides[axis] = elements;
      elements *= shape[axis] + (pitch_gaps.empty() ? 0 : pitch_gaps[axis]);
    }
    memory_.assign(static_cast<size_t>(elements * dtype_bytes(dtype)) + 2 * kGuardBytes, kSentinel);
  }

  /// The view; valid while this object lives and is not assigned to.
  [[nodiscard]] TensorView view() {
    TensorView view = view_;
    view.data = memory_.data() + kGuardBytes;
    return view;
  }
  operator TensorView() { return view(); }  // NOLINT(google-explicit-constructor)

  [[nodiscard]] int64_t size() const { return view_.num_elements(); }

  /// Element `index` of the row-major order.
  template <class T>
  T& at(int64_t index) {
    return *reinterpret_cast<T*>(memory_.data() + byte_offset(index));
  }
  /// As at(), by one index an axis.
  template <class T>
  T& at(std::initializer_list<int64_t> indices) {
    int64_t offset = 0;
    int axis = 0;
    for (const int64_t index : indices) offset += index * view_.strides[axis++];
    return *reinterpret_cast<T*>(memory_.data() + kGuardBytes + static_cast<size_t>(offset * dtype_bytes(view_.dtype)));
  }

  /// Uniform floats in [-range, range].
  GuardedTensor& fill_floats(std::mt19937& random, float range) {
    std::uniform_real_distribution<float> uniform(-range, range);
    for (int64_t i = 0; i < size(); ++i) set_float(i, uniform(random));
    return *this;
  }
  /// Any bytes at all: NaN payloads, infinities, subnormals.
  GuardedTensor& fill_bits(std::mt19937& random) {
    for (int64_t i = 0; i < size(); ++i) {
      const auto bits = uint64_t{random()} << 32 | random();
      std::memcpy(memory_.data() + byte_offset(i), &bits, static_cast<size_t>(dtype_bytes(view_.dtype)));
    }
    return *this;
  }
  template <class T>
  GuardedTensor& fill(const std::vector<T>& values) {
    for (int64_t i = 0; i < size(); ++i) at<T>(i) = values[static_cast<size_t>(i)];
    return *this;
  }

  void set_float(int64_t index, float value) {
    switch (view_.dtype) {
      case DType::kF16:
        at<F16>(index) = F16::from_float(value);
        break;
      case DType::kBF16:
        at<BF16>(index) = BF16::from_float(value);
        break;
      default:
        at<float>(index) = value;
        break;
    }
  }
  [[nodiscard]] float get_float(int64_t index) {
    switch (view_.dtype) {
      case DType::kF16:
        return at<F16>(index).to_float();
      case DType::kBF16:
        return at<BF16>(index).to_float();
      case DType::kF8E4M3:
        return at<F8E4M3>(index).to_float();
      default:
        return at<float>(index);
    }
  }

  /// True when every byte outside the view still is the sentinel.
  [[nodiscard]] bool guards_intact() const {
    std::vector<bool> inside(memory_.size());
    for (int64_t i = 0; i < size(); ++i) {
      for (int64_t b = 0; b < dtype_bytes(view_.dtype); ++b) inside[byte_offset(i) + static_cast<size_t>(b)] = true;
    }
    for (size_t i = 0; i < memory_.size(); ++i) {
      if (!inside[i] && memory_[i] != kSentinel) return false;
    }
    return true;
  }

  /// All bytes, guards and gaps included.
  [[nodiscard]] const std::vector<uint8_t>& memory() const { return memory_; }

 private:
  static constexpr size_t kGuardBytes = 128;

  [[nodiscard]] size_t byte_offset(int64_t index) const {
    int64_t offset = 0;
    for (int axis = view_.rank - 1; axis >= 0; --axis) {
      offset += index % view_.shape[axis] * view_.strides[axis];
      index /= view_.shape[axis];
    }
    return kGuardBytes + static_cast<size_t>(offset * dtype_bytes(view_.dtype));
  }

  TensorView view_;
  std::vector<uint8_t> memory_;
};

}  // namespace polyop::testing
