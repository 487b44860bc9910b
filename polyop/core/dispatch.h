// Dispatch from run-time values to compile-time ones over a fixed list: the list of what exists stands once, at the
// call.
#pragma once

#include <string>
#include <type_traits>
#include <utility>

#include "polyop/core/numeric_types.h"
#include "polyop/core/status.h"

namespace polyop {

/// visit_dtypes<float, F16>(dtype, [&]<class T> { ... return Status; }) runs the lambda with the C++ type of `dtype`;
/// kUnsupported with the list otherwise. The lambda may return void.
template <class... Types, class Fn>
Status visit_dtypes(DType dtype, Fn&& fn) {
  Status status;
  const auto visit_one = [&]<class T>() {
    if (dtype != kDTypeOf<T>) return false;
    if constexpr (std::is_void_v<decltype(fn.template operator()<T>())>) {
      fn.template operator()<T>();
    } else {
      status = fn.template operator()<T>();
    }
    return true;
  };
  if ((visit_one.template operator()<Types>() || ...)) return status;
  std::string list;
  ((list += (list.empty() ? "" : ", ") + std::string(dtype_name(kDTypeOf<Types>))), ...);
  return unsupported("dtype " + std::string(dtype_name(dtype)) + " is not among " + list);
}

/// visit_values<64, 128>(head_size, [&]<int kHeadSize> { ... }) likewise for integers.
template <int... Values, class Fn>
Status visit_values(int64_t value, Fn&& fn) {
  Status status;
  const auto visit_one = [&]<int kValue>() {
    if (value != kValue) return false;
    if constexpr (std::is_void_v<decltype(fn.template operator()<kValue>())>) {
      fn.template operator()<kValue>();
    } else {
      status = fn.template operator()<kValue>();
    }
    return true;
  };
  if ((visit_one.template operator()<Values>() || ...)) return status;
  std::string list;
  ((list += (list.empty() ? "" : ", ") + std::to_string(Values)), ...);
  return unsupported(std::to_string(value) + " is not among " + list);
}

}  // namespace polyop
