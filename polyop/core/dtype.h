// DType: the element types a tensor can have, their names and sizes.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

namespace polyop {

enum class DType : uint8_t { kF32, kF16, kBF16, kF8E4M3, kI64, kI32, kI8, kU8, kI4, kBool };

inline constexpr DType kAllDTypes[] = {DType::kF32, DType::kF16, DType::kBF16, DType::kF8E4M3, DType::kI64,
                                       DType::kI32, DType::kI8,  DType::kU8,   DType::kI4,     DType::kBool};

/// Short name used in schemas, errors and docs: "f32", "f8e4m3", "bool", ...
constexpr std::string_view dtype_name(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return "f32";
    case DType::kF16:
      return "f16";
    case DType::kBF16:
      return "bf16";
    case DType::kF8E4M3:
      return "f8e4m3";
    case DType::kI64:
      return "i64";
    case DType::kI32:
      return "i32";
    case DType::kI8:
      return "i8";
    case DType::kU8:
      return "u8";
    case DType::kI4:
      return "i4";
    case DType::kBool:
      return "bool";
  }
  return "unknown";
}

/// The DType with this short name, or nothing.
constexpr std::optional<DType> dtype_from_name(std::string_view name) {
  for (DType dtype : kAllDTypes) {
    if (dtype_name(dtype) == name) return dtype;
  }
  return std::nullopt;
}

/// Bits of one element; i4 is the only type below a byte (two per byte, low nibble first).
constexpr int64_t dtype_bits(DType dtype) {
  switch (dtype) {
    case DType::kI64:
      return 64;
    case DType::kF32:
    case DType::kI32:
      return 32;
    case DType::kF16:
    case DType::kBF16:
      return 16;
    case DType::kI4:
      return 4;
    default:
      return 8;
  }
}

/// Bytes of one element; an i4 pair shares a byte, so i4 tensors are addressed in bytes by their operator.
constexpr int64_t dtype_bytes(DType dtype) { return (dtype_bits(dtype) + 7) / 8; }

constexpr bool dtype_is_float(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kF16 || dtype == DType::kBF16 || dtype == DType::kF8E4M3;
}

}  // namespace polyop
