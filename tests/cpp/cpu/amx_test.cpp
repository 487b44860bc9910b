// The AMX wrappers against their documented order of sums, and the split of f32 numbers into bf16 pieces.
#include "polyop/cpu/amx.h"
#if POLYOP_AMX

#include "polyop/cpu/avx512_target.h"
//
#include <gtest/gtest.h>
#include <hwy/highway.h>

#include <array>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "polyop/core/numeric_types.h"
#include "polyop/cpu/bf16_pieces-inl.h"

HWY_BEFORE_NAMESPACE();
namespace polyop::cpu {
namespace HWY_NAMESPACE {

constexpr size_t kPieceBlock = 32;

template <int kPieces>
void split_32(const float* from, uint16_t* pieces) {
  const hn::ScalableTag<float> d;
  static_assert(2 * hn::MaxLanes(d) == kPieceBlock);
  store_bf16_pieces<kPieces>(d, hn::LoadU(d, from), hn::LoadU(d, from + kPieceBlock / 2), pieces, kPieceBlock);
}

}  // namespace HWY_NAMESPACE
}  // namespace polyop::cpu
HWY_AFTER_NAMESPACE();

namespace polyop::cpu {
namespace {

constexpr const char* kNoAmx = "this machine has no AMX-BF16, or POLYOP_AMX=0 is set";

float widen(uint16_t bits) {
  BF16 number;
  static_assert(sizeof(number) == sizeof(bits));
  std::memcpy(&number, &bits, sizeof(bits));
  return number.to_float();
}

TEST(Amx, ProductsSumInTheDocumentedOrder) {
  if (!has_amx_bf16()) GTEST_SKIP() << kNoAmx;
  std::mt19937 random(1);
  std::uniform_int_distribution<int> bits(0, 0xffff);
  const auto moderate = [&] { return static_cast<uint16_t>((bits(random) & 0x83ff) | 0x3c00); };
  uint16_t left[kAmxRows][kAmxDepth];
  uint16_t right[kAmxDepth / 2][2 * kAmxRows];
  float sums[kAmxRows][kAmxRows];
  for (auto& row : left) {
    for (auto& number : row) number = moderate();
  }
  for (auto& row : right) {
    for (auto& number : row) number = moderate();
  }
  for (int m = 0; m < kAmxRows; ++m) {
    for (int n = 0; n < kAmxRows; ++n) sums[m][n] = static_cast<float>(m - n);
  }
  float expected[kAmxRows][kAmxRows];
  for (int m = 0; m < kAmxRows; ++m) {
    for (int n = 0; n < kAmxRows; ++n) {
      float even = 0.0f;
      float odd = 0.0f;
      for (int k = 0; k < kAmxDepth; k += 2) {
        even = std::fma(widen(left[m][k]), widen(right[k / 2][2 * n]), even);
        odd = std::fma(widen(left[m][k + 1]), widen(right[k / 2][2 * n + 1]), odd);
      }
      expected[m][n] = sums[m][n] + (even + odd);
    }
  }
  {
    const AmxTiles tiles;
    tile_load<0>(sums, sizeof(sums[0]));
    tile_load<1>(left, sizeof(left[0]));
    tile_load<2>(right, sizeof(right[0]));
    tile_multiply_bf16<0, 1, 2>();
    tile_store<0>(sums, sizeof(sums[0]));
  }
  for (int m = 0; m < kAmxRows; ++m) {
    for (int n = 0; n < kAmxRows; ++n) EXPECT_EQ(sums[m][n], expected[m][n]) << "row " << m << ", column " << n;
  }
}

TEST(Amx, ByteProductsOfOtherShapesAreExact) {
  if (!has_amx_int8()) GTEST_SKIP() << "this machine has no AMX-INT8, or POLYOP_AMX=0 is set";
  constexpr int kDepth = 32;
  std::mt19937 random(5);
  std::array<std::array<int8_t, kDepth>, kAmxRows> left{};
  std::array<std::array<int8_t, kAmxRowBytes>, kDepth / 4> right{};
  std::array<std::array<int32_t, kAmxRows>, kAmxRows> sums{};
  for (auto& row : left) {
    for (int8_t& number : row) number = static_cast<int8_t>(random());
  }
  for (auto& row : right) {
    for (int8_t& number : row) number = static_cast<int8_t>(random());
  }
  {
    AmxShapes shapes;
    shapes.row_bytes[1] = kDepth;
    shapes.rows[2] = kDepth / 4;
    const AmxTiles tiles(shapes);
    tile_zero<0>();
    tile_load<1>(left.data(), kDepth);
    tile_load<2>(right.data(), kAmxRowBytes);
    tile_multiply_s8<0, 1, 2>();
    tile_store<0>(sums.data(), kAmxRowBytes);
  }
  for (size_t m = 0; m < kAmxRows; ++m) {
    for (size_t n = 0; n < kAmxRows; ++n) {
      int32_t expected = 0;
      for (size_t k = 0; k < kDepth; ++k) expected += left[m][k] * right[k / 4][4 * n + k % 4];
      EXPECT_EQ(sums[m][n], expected) << "row " << m << ", column " << n;
    }
  }
}

TEST(Bf16Pieces, SumsAreExactForThree) {
  if (!has_amx_bf16()) GTEST_SKIP() << kNoAmx;
  std::mt19937 random(2);
  std::normal_distribution<float> normal;
  std::array<float, HWY_NAMESPACE::kPieceBlock> from{};
  for (float& number : from) number = std::ldexp(normal(random), static_cast<int>(random() % 60) - 30);
  from[0] = 0.0f;
  from[1] = std::nextafter(2.0f, 0.0f);
  from[2] = -from[1];
  std::array<uint16_t, 3 * HWY_NAMESPACE::kPieceBlock> pieces{};
  HWY_NAMESPACE::split_32<3>(from.data(), pieces.data());
  for (size_t i = 0; i < from.size(); ++i) {
    const float low = widen(pieces[from.size() + i]) + widen(pieces[2 * from.size() + i]);
    EXPECT_EQ(widen(pieces[i]) + low, from[i]);
  }
}

TEST(Bf16Pieces, TwoHoldF16ExactlyAndF32To17Bits) {
  if (!has_amx_bf16()) GTEST_SKIP() << kNoAmx;
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  std::array<float, HWY_NAMESPACE::kPieceBlock> from{};
  std::array<uint16_t, 2 * HWY_NAMESPACE::kPieceBlock> pieces{};
  const auto sum = [&](size_t i) { return widen(pieces[i]) + widen(pieces[from.size() + i]); };
  for (float& number : from) number = F16::from_float(normal(random)).to_float();
  HWY_NAMESPACE::split_32<2>(from.data(), pieces.data());
  for (size_t i = 0; i < from.size(); ++i) EXPECT_EQ(sum(i), from[i]);

  for (float& number : from) number = normal(random);
  HWY_NAMESPACE::split_32<2>(from.data(), pieces.data());
  for (size_t i = 0; i < from.size(); ++i) EXPECT_LE(std::fabs(sum(i) - from[i]), std::fabs(from[i]) * 0x1p-16f);
}

TEST(Bf16Pieces, OneIsRoundedToNearest) {
  if (!has_amx_bf16()) GTEST_SKIP() << kNoAmx;
  std::array<float, HWY_NAMESPACE::kPieceBlock> from{};
  from[0] = 1.0f + 0x1.1p-8f;
  from[1] = 1.0f + 0x0.fp-8f;
  from[2] = std::numeric_limits<float>::infinity();
  std::array<uint16_t, HWY_NAMESPACE::kPieceBlock> pieces{};
  HWY_NAMESPACE::split_32<1>(from.data(), pieces.data());
  EXPECT_EQ(widen(pieces[0]), 1.0f + 0x1p-7f);
  EXPECT_EQ(widen(pieces[1]), 1.0f);
  EXPECT_EQ(widen(pieces[2]), from[2]);
}

}  // namespace
}  // namespace polyop::cpu

#endif  // POLYOP_AMX
