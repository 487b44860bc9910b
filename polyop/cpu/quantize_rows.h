// quantize_rows: rows of floats to rows of f8e4m3 or i8.
#pragma once

#include <cstdint>

#include "polyop/core/dtype.h"

namespace polyop::cpu {

/// `rows` rows of `width` elements on both sides; strides in elements.
struct QuantizeRows {
  const void* from = nullptr;
  DType from_dtype = DType::kF32;  // f32, f16 or bf16
  int64_t from_stride = 0;
  void* to = nullptr;
  DType to_dtype = DType::kI8;  // f8e4m3 or i8
  int64_t to_stride = 0;
  int64_t rows = 0;
  int64_t width = 0;
  float scale = 1.0f;
};

/// to = from_float(from / scale), the quotient rounded to f32 first; bit for bit what polyop/core/numeric_types.h
/// gives.
void quantize_rows(const QuantizeRows& rows);

}  // namespace polyop::cpu
