// kv_cache_update: FP8 and INT8 rounding over all f16 and bf16 values and dense f32 samples, on every SIMD target.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "tests/cpp/testing/call_kernel.h"
#include "tests/cpp/testing/guarded_tensor.h"
#include "tests/cpp/testing/simd_targets.h"

namespace polyop {
namespace {

using testing::call_kernel;
using testing::GuardedTensor;

/// The nearest finite E4M3 magnitude by search over all of them; a tie goes to the even code.
uint8_t search_f8(double value) {
  if (std::isnan(value)) return 0x7f;
  const double magnitude = std::min(std::abs(value), 448.0);
  uint8_t best = 0;
  double best_error = std::numeric_limits<double>::infinity();
  for (uint8_t code = 0; code < 0x7f; ++code) {
    const int exponent = code >> 3;
    const double mantissa = code & 7;
    const double candidate = exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8.0 + mantissa, exponent - 10);
    const double error = std::abs(candidate - magnitude);
    if (error < best_error || (error == best_error && code % 2 == 0)) {
      best = code;
      best_error = error;
    }
  }
  return static_cast<uint8_t>(best | (std::signbit(value) ? 0x80 : 0));
}

int search_i8(double value) {
  if (std::isnan(value)) return 0;
  const double clamped = std::min(127.0, std::max(-128.0, value));
  const double below = std::floor(clamped);
  const double rest = clamped - below;
  const bool up = rest > 0.5 || (rest == 0.5 && std::fmod(below, 2.0) != 0.0);
  return static_cast<int>(below) + (up ? 1 : 0);
}

/// Stores `update` [T, 1, D] in a linear cache and checks every element against the searches.
void check_stored(GuardedTensor& update, DType cache_dtype, float scale) {
  const TensorView view = update.view();
  GuardedTensor cache(cache_dtype, {1, 1, view.shape[0], view.shape[2]});
  GuardedTensor offsets(DType::kI32, {2});
  offsets.fill<int32_t>({0, static_cast<int32_t>(view.shape[0])});
  GuardedTensor k_scale(DType::kF32, {1});
  k_scale.at<float>(0) = scale;
  const Status status =
      call_kernel({"kv_cache_update",
                   {{"k_cache", cache}, {"k", update}, {"update_offsets", offsets}, {"k_scale", k_scale}},
                   {{"cache_form", AttributeValue::of_text("linear")}}},
                  "cpu_runs");
  ASSERT_TRUE(status.is_ok()) << status.message();
  for (int64_t i = 0; i < update.size(); ++i) {
    const float quotient = update.get_float(i) / scale;
    if (cache_dtype == DType::kI8) {
      ASSERT_EQ(cache.at<int8_t>(i), search_i8(quotient)) << update.get_float(i) << " / " << scale;
    } else {
      const uint8_t got = cache.at<F8E4M3>(i).bits;
      const uint8_t wanted = search_f8(quotient);
      ASSERT_EQ(std::isnan(quotient) ? got & 0x7f : got, wanted) << update.get_float(i) << " / " << scale;
    }
  }
  EXPECT_TRUE(cache.guards_intact());
}

TEST(KvCacheUpdate_Quantization, AllHalves_RoundToNearestEven_EveryTarget) {
  for (const DType dtype : {DType::kF16, DType::kBF16}) {
    GuardedTensor update(dtype, {1024, 1, 64});
    for (int64_t i = 0; i < 65536; ++i) update.at<uint16_t>(i) = static_cast<uint16_t>(i);
    for (const DType cache_dtype : {DType::kF8E4M3, DType::kI8}) {
      SCOPED_TRACE(std::string(dtype_name(dtype)) + " to " + std::string(dtype_name(cache_dtype)));
      testing::on_every_simd_target([&] {
        check_stored(update, cache_dtype, 1.0f);
        check_stored(update, cache_dtype, 0.037f);
      });
    }
  }
}

TEST(KvCacheUpdate_Quantization, F32TiesAndNeighbours_RoundToNearestEven_EveryTarget) {
  std::vector<float> values = {0.0f, -0.0f, INFINITY, -INFINITY, NAN, 1e-30f, -3e38f, 447.99f, 463.9f, 464.0f, 465.0f};
  for (int code = 0; code < 0x7e; ++code) {  // halfway between neighbours of E4M3, and one step to each side
    const float middle =
        0.5f * (F8E4M3{static_cast<uint8_t>(code)}.to_float() + F8E4M3{static_cast<uint8_t>(code + 1)}.to_float());
    for (const float value : {middle, std::nextafter(middle, 0.0f), std::nextafter(middle, 1e9f)}) {
      values.push_back(value);
      values.push_back(-value);
    }
  }
  for (int i = -131; i <= 131; ++i) {
    const float middle = static_cast<float>(i) + 0.5f;
    for (const float value : {middle, std::nextafter(middle, -1e9f), std::nextafter(middle, 1e9f)}) {
      values.push_back(value);
    }
  }
  for (const int64_t head_dim : {1, 3, 37, 64}) {  // scalar tail, short vectors, full vectors
    const int64_t tokens = (static_cast<int64_t>(values.size()) + head_dim - 1) / head_dim;
    GuardedTensor update(DType::kF32, {tokens, 1, head_dim});
    for (int64_t i = 0; i < update.size(); ++i) {
      update.at<float>(i) = values[static_cast<size_t>(i) % values.size()];
    }
    testing::on_every_simd_target([&] {
      check_stored(update, DType::kF8E4M3, 1.0f);
      check_stored(update, DType::kI8, 1.0f);
    });
  }
}

}  // namespace
}  // namespace polyop
