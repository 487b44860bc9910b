// dtype, numeric_types and dispatch: names and sizes; rounding against arithmetic in double that shares no code with
// it.
#include "polyop/core/numeric_types.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "polyop/core/dispatch.h"

namespace polyop {
namespace {

/// A binary format: p significant bits, least normal exponent, greatest finite value, and what lies beyond it.
struct Format {
  int precision;
  int min_exponent;
  double greatest;
  bool saturates;
};
constexpr Format kF16Format = {.precision = 11, .min_exponent = -14, .greatest = 65504.0, .saturates = false};
constexpr Format kBf16Format = {.precision = 8, .min_exponent = -126, .greatest = 0x1.fep127, .saturates = false};
constexpr Format kF8Format = {.precision = 4, .min_exponent = -6, .greatest = 448.0, .saturates = true};

/// `value` rounded to nearest even in the format: whole multiples of the step at its exponent.
double rounded(double value, const Format& format) {
  if (value == 0.0 || std::isnan(value)) return value;
  if (std::isinf(value)) return std::copysign(format.saturates ? format.greatest : INFINITY, value);
  const int exponent = std::max(std::ilogb(value), format.min_exponent);
  const double step = std::ldexp(1.0, exponent - (format.precision - 1));
  const double result = std::nearbyint(value / step) * step;
  if (std::abs(result) <= format.greatest) return result;
  return std::copysign(format.saturates ? format.greatest : INFINITY, value);
}

template <class T>
void expect_rounds(float value, const Format& format) {
  const double wanted = rounded(value, format);
  const float got = T::from_float(value).to_float();
  if (std::isnan(wanted)) {
    ASSERT_TRUE(std::isnan(got)) << value;
  } else {
    ASSERT_EQ(static_cast<double>(got), wanted) << std::hexfloat << value;
    ASSERT_EQ(std::signbit(got), std::signbit(value)) << std::hexfloat << value;
  }
}

template <class T>
void check_rounding(const Format& format, int num_codes) {
  constexpr uint64_t kStep = 3001;  // prime: about 1.4 million floats of every exponent
  for (uint64_t bits = 0; bits <= 0xffffffffu; bits += kStep) {
    expect_rounds<T>(std::bit_cast<float>(static_cast<uint32_t>(bits)), format);
  }
  for (int code = 0; code + 1 < num_codes; ++code) {  // halfway between neighbours, and a hair to both sides
    const float low = T{static_cast<decltype(T::bits)>(code)}.to_float();
    const float high = T{static_cast<decltype(T::bits)>(code + 1)}.to_float();
    if (!std::isfinite(low) || !std::isfinite(high)) continue;
    const auto middle = static_cast<float>(0.5 * (static_cast<double>(low) + high));
    for (const float value : {middle, std::nextafter(middle, 0.0f), std::nextafter(middle, INFINITY), low}) {
      expect_rounds<T>(value, format);
      expect_rounds<T>(-value, format);
    }
  }
  for (const float value : {0.0f, -0.0f, INFINITY, -INFINITY, NAN, std::numeric_limits<float>::denorm_min(),
                            std::numeric_limits<float>::max(), std::numeric_limits<float>::lowest(), 65519.9f, 65520.0f,
                            464.0f, 463.99f, 480.0f}) {
    expect_rounds<T>(value, format);
  }
}

/// Value of a code from its fields.
double decoded(uint32_t code, int exponent_bits, int mantissa_bits, bool has_infinity) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const auto exponent = static_cast<int>(code >> mantissa_bits) & ((1 << exponent_bits) - 1);
  const auto mantissa = static_cast<int>(code) & ((1 << mantissa_bits) - 1);
  const double sign = (code >> (exponent_bits + mantissa_bits)) & 1 ? -1.0 : 1.0;
  const bool is_top = exponent == (1 << exponent_bits) - 1;
  if (has_infinity && is_top) return mantissa == 0 ? sign * INFINITY : NAN;
  if (!has_infinity && is_top && mantissa == (1 << mantissa_bits) - 1) return NAN;
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - mantissa_bits);
  return sign * std::ldexp((1 << mantissa_bits) + mantissa, exponent - bias - mantissa_bits);
}

template <class T>
void check_codes(uint32_t num_codes, int exponent_bits, int mantissa_bits, bool has_infinity) {
  for (uint32_t code = 0; code < num_codes; ++code) {
    const T number{static_cast<decltype(T::bits)>(code)};
    const double wanted = decoded(code, exponent_bits, mantissa_bits, has_infinity);
    if (std::isnan(wanted)) {
      ASSERT_TRUE(std::isnan(number.to_float())) << code;
      ASSERT_TRUE(std::isnan(T::from_float(number.to_float()).to_float())) << code;
    } else {
      ASSERT_EQ(static_cast<double>(number.to_float()), wanted) << code;
      ASSERT_EQ(T::from_float(number.to_float()).bits, code) << "there and back";
    }
  }
}

TEST(NumericTypes, EveryCode_WidensExactlyAndComesBack) {
  check_codes<F16>(65536, 5, 10, true);
  check_codes<BF16>(65536, 8, 7, true);
  check_codes<F8E4M3>(256, 4, 3, false);
}

TEST(NumericTypes, Narrowing_RoundsToNearestEven) {
  check_rounding<F16>(kF16Format, 0x8000);
  check_rounding<BF16>(kBf16Format, 0x8000);
  check_rounding<F8E4M3>(kF8Format, 0x80);
}

TEST(NumericTypes, Int8_RoundsToNearestEvenAndSaturates) {
  for (int i = -4000; i <= 4000; ++i) {
    const float value = static_cast<float>(i) / 16.0f;
    const double wanted = std::min(127.0, std::max(-128.0, std::nearbyint(static_cast<double>(value))));
    ASSERT_EQ(from_float<int8_t>(value), wanted) << value;
  }
  EXPECT_EQ(from_float<int8_t>(NAN), 0);
  EXPECT_EQ(from_float<int8_t>(INFINITY), 127);
  EXPECT_EQ(from_float<int8_t>(-INFINITY), -128);
  EXPECT_EQ(from_float<int8_t>(3e9f), 127);
}

TEST(NumericTypes, FloatPassesThrough) {
  EXPECT_EQ(to_float(1.25f), 1.25f);
  EXPECT_EQ(from_float<float>(0.1f), 0.1f);
  EXPECT_EQ(to_float(int8_t{-7}), -7.0f);
  EXPECT_EQ(to_float(F16{0x3c00}), 1.0f);
  EXPECT_EQ(to_float(BF16{0x3f80}), 1.0f);
  EXPECT_EQ(to_float(F8E4M3{0x38}), 1.0f);
}

TEST(DType, Names_GoThereAndBack) {
  for (const DType dtype : kAllDTypes) EXPECT_EQ(dtype_from_name(dtype_name(dtype)), dtype);
  EXPECT_EQ(dtype_from_name("float"), std::nullopt);
  EXPECT_EQ(dtype_name(DType::kF8E4M3), "f8e4m3");
}

TEST(DType, SizesAndKinds) {
  EXPECT_EQ(dtype_bits(DType::kI4), 4);
  EXPECT_EQ(dtype_bytes(DType::kI4), 1);
  EXPECT_EQ(dtype_bytes(DType::kBool), 1);
  EXPECT_EQ(dtype_bytes(kDTypeOf<float>), static_cast<int64_t>(sizeof(float)));
  EXPECT_EQ(dtype_bytes(kDTypeOf<F16>), static_cast<int64_t>(sizeof(F16)));
  EXPECT_EQ(dtype_bytes(kDTypeOf<BF16>), static_cast<int64_t>(sizeof(BF16)));
  EXPECT_EQ(dtype_bytes(kDTypeOf<F8E4M3>), static_cast<int64_t>(sizeof(F8E4M3)));
  EXPECT_EQ(dtype_bytes(kDTypeOf<int64_t>), 8);
  EXPECT_EQ(dtype_bytes(kDTypeOf<int32_t>), 4);
  EXPECT_EQ(dtype_bytes(kDTypeOf<uint8_t>), 1);
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16, DType::kF8E4M3}) EXPECT_TRUE(dtype_is_float(dtype));
  for (const DType dtype : {DType::kI64, DType::kI32, DType::kI8, DType::kU8, DType::kI4, DType::kBool}) {
    EXPECT_FALSE(dtype_is_float(dtype));
  }
}

TEST(Dispatch, Visits_TheOneListed) {
  int64_t bytes = 0;
  EXPECT_TRUE((visit_dtypes<float, F16>(DType::kF16, [&]<class T>() { bytes = sizeof(T); }).is_ok()));
  EXPECT_EQ(bytes, 2);
  EXPECT_EQ((visit_dtypes<float, F16>(DType::kF32, []<class T>() { return unsupported("inner"); }).message()), "inner");
  int head_dim = 0;
  EXPECT_TRUE((visit_values<64, 128>(128, [&]<int kHeadDim>() { head_dim = kHeadDim; }).is_ok()));
  EXPECT_EQ(head_dim, 128);
}

TEST(Dispatch, Refuses_WithTheList) {
  const Status dtype = visit_dtypes<float, F16>(DType::kI8, []<class T>() {});
  EXPECT_EQ(dtype.code(), StatusCode::kUnsupported);
  EXPECT_EQ(dtype.message(), "dtype i8 is not among f32, f16");
  const Status value = visit_values<64, 128>(80, []<int kHeadDim>() {});
  EXPECT_EQ(value.code(), StatusCode::kUnsupported);
  EXPECT_EQ(value.message(), "80 is not among 64, 128");
}

}  // namespace
}  // namespace polyop
