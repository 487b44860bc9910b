#include "polyop/ops/int4_groupwise_gemm/packing.h"

#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <random>
#include <string>
#include <vector>

namespace polyop {
namespace {

// FIPS 180-4, for the hashes of the published layout.
std::string sha256(std::vector<uint8_t> message) {
  // Fractional parts of the cube roots of the first 64 primes and the square roots of the first 8.
  static constexpr std::array<uint32_t, 64> kRounds = {
      0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
      0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
      0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
      0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
      0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
      0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
      0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
      0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};
  std::array<uint32_t, 8> state = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                   0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  const uint64_t bits = message.size() * 8;
  message.push_back(0x80);
  while (message.size() % 64 != 56) message.push_back(0);
  for (int byte = 7; byte >= 0; --byte) message.push_back(static_cast<uint8_t>(bits >> 8 * byte));
  for (size_t block = 0; block < message.size(); block += 64) {
    std::array<uint32_t, 64> w;
    for (size_t i = 0; i < 64; ++i) {
      if (i < 16) {
        const uint8_t* b = &message[block + 4 * i];
        w[i] = uint32_t{b[0]} << 24 | uint32_t{b[1]} << 16 | uint32_t{b[2]} << 8 | b[3];
      } else {
        const uint32_t s0 = std::rotr(w[i - 15], 7) ^ std::rotr(w[i - 15], 18) ^ w[i - 15] >> 3;
        const uint32_t s1 = std::rotr(w[i - 2], 17) ^ std::rotr(w[i - 2], 19) ^ w[i - 2] >> 10;
        w[i] = w[i - 16] + s0 + w[i - 7] + s1;
      }
    }
    auto [a, b, c, d, e, f, g, h] = state;
    for (size_t i = 0; i < 64; ++i) {
      const uint32_t s1 = std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25);
      const uint32_t t1 = h + s1 + ((e & f) ^ (~e & g)) + kRounds[i] + w[i];
      const uint32_t s0 = std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22);
      const uint32_t t2 = s0 + ((a & b) ^ (a & c) ^ (b & c));
      h = g, g = f, f = e, e = d + t1, d = c, c = b, b = a, a = t1 + t2;
    }
    const std::array<uint32_t, 8> added = {a, b, c, d, e, f, g, h};
    for (size_t i = 0; i < 8; ++i) state[i] += added[i];
  }
  std::string hex;
  for (uint32_t word : state) {
    for (int nibble = 7; nibble >= 0; --nibble) hex += "0123456789abcdef"[word >> 4 * nibble & 15];
  }
  return hex;
}

// The pattern that the published hashes were made with.
std::vector<uint8_t> golden_pattern(int64_t n, int64_t k) {
  std::vector<uint8_t> q;
  for (int64_t row = 0; row < n; ++row) {
    for (int64_t i = 0; i < k; ++i) q.push_back((7 * row + 3 * i + row * i / 5 + row / 3) % 16);
  }
  return q;
}

std::vector<uint8_t> pack(const std::vector<uint8_t>& q, int64_t n, int64_t k) {
  std::vector<uint8_t> packed(int4_fragment_rows(n, k) * kFragmentRowBytes, 0xcc);
  EXPECT_EQ(pack_int4_fragments(q.data(), n, k, packed.data()).message(), "");
  return packed;
}

TEST(Int4GroupwiseGemm_Packing, Sha256_MatchesItsStandard) {
  EXPECT_EQ(sha256({'a', 'b', 'c'}), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
}

TEST(Int4GroupwiseGemm_Packing, Pack_MatchesPublishedBytes) {
  const std::vector<uint8_t> square = pack(golden_pattern(64, 64), 64, 64);
  const std::vector<uint8_t> first(square.begin(), square.begin() + 16);
  EXPECT_EQ(first, (std::vector<uint8_t>{128, 90, 179, 227, 230, 140, 25, 22, 76, 175, 127, 73, 162, 210, 213, 123}));
  EXPECT_EQ(sha256(square), "bb44bdb9eeb4dbd2b77f7e7c29d16e59f3e1d4236823bc915411035b28f3533a");
  EXPECT_EQ(sha256(pack(golden_pattern(192, 128), 192, 128)),
            "6ad6c7e9e15adb2f8735cffaa27b51c906fb81f31d29fbe5a600ae24b43f5312");
  EXPECT_EQ(sha256(pack(golden_pattern(33, 64), 33, 64)),
            "7a44e7da5bffcd992632cc6c86d1dbc8e06bb728bbfa75ea31302897e9805c19");
}

TEST(Int4GroupwiseGemm_Packing, Unpack_InvertsPack_AnyExtents) {
  std::mt19937 random(7);
  for (const int64_t n : {0, 1, 2, 31, 33, 64, 127, 129, 130, 300}) {
    for (const int64_t k : {0, 1, 7, 63, 64, 65, 100, 200}) {
      std::vector<uint8_t> q(n * k);
      for (uint8_t& value : q) value = random() & 15;
      const std::vector<uint8_t> packed = pack(q, n, k);
      std::vector<uint8_t> back(n * k, 0xcc);
      ASSERT_TRUE(unpack_int4_fragments(packed.data(), n, k, back.data()).is_ok());
      ASSERT_EQ(back, q) << n << " x " << k;
    }
  }
}

TEST(Int4GroupwiseGemm_Packing, Address_AgreesWithPack_PaddingIsZeroWeight) {
  const int64_t n = 130, k = 100, depth_blocks = 2;
  const std::vector<uint8_t> q = golden_pattern(n, k);
  const std::vector<uint8_t> packed = pack(q, n, k);
  for (int64_t column = 0; column < 256; ++column) {
    for (int64_t depth = 0; depth < 128; ++depth) {
      const NibbleAddress at = int4_fragment_address(column, depth, depth_blocks);
      const int expected = column < n && depth < k ? q[column * k + depth] : kInt4Bias;
      ASSERT_EQ(packed[at.byte] >> at.shift & 15, expected) << column << ", " << depth;
    }
  }
}

TEST(Int4GroupwiseGemm_Packing, Pack_RejectsWhatIsNoNibble) {
  std::vector<uint8_t> q(6, 3);
  q[4] = 16;
  std::vector<uint8_t> packed(int4_fragment_rows(2, 3) * kFragmentRowBytes, 0xcc);
  const Status status = pack_int4_fragments(q.data(), 2, 3, packed.data());
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(), "pack_int4_fragments: q[1, 1] is 16, wanted 0 to 15");
  EXPECT_EQ(packed, std::vector<uint8_t>(packed.size(), 0xcc));
  EXPECT_EQ(pack_int4_fragments(nullptr, -1, 64, nullptr).message(),
            "pack_int4_fragments: q has shape [-1, 64], wanted extents of at least 0");
  EXPECT_EQ(unpack_int4_fragments(nullptr, 1, -64, nullptr).message(),
            "unpack_int4_fragments: q has shape [1, -64], wanted extents of at least 0");
}

}  // namespace
}  // namespace polyop
