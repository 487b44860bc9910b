// RotaryTable: which channels of a head form pairs, and by which angles a token's pairs are turned. The part that the
// problems of all operators that apply rotary embedding have in common.
#pragma once

#include <cstdint>

namespace polyop {

struct RotaryTable {
  int64_t rotary_dim = 0;              // Drot, even, at most the head size; channels from there on are not turned
  bool interleaved = false;            // pairs (2j, 2j+1) instead of (j, j + Drot/2)
  const float* cos_sin = nullptr;      // one row a position: Drot/2 cosines, then Drot/2 sines
  int64_t cos_sin_stride = 0;          // elements between rows
  int64_t num_positions = 0;           // rows
  const void* position_ids = nullptr;  // [T] i32 or i64, dense; null: the operator says which row belongs to a token
  bool position_ids_are_i64 = false;

  /// position_ids[token]; only where there are some.
  [[nodiscard]] constexpr int64_t position_id(int64_t token) const {
    return position_ids_are_i64 ? static_cast<const int64_t*>(position_ids)[token]
                                : static_cast<const int32_t*>(position_ids)[token];
  }
  /// Channel of the first element of pair `pair`, and of the second.
  [[nodiscard]] constexpr int64_t first_channel(int64_t pair) const { return interleaved ? 2 * pair : pair; }
  [[nodiscard]] constexpr int64_t second_channel(int64_t pair) const {
    return interleaved ? 2 * pair + 1 : pair + rotary_dim / 2;
  }
  /// The cosines of a position; its sines stand rotary_dim / 2 behind them.
  [[nodiscard]] constexpr const float* cosines(int64_t position) const { return cos_sin + position * cos_sin_stride; }

  /// The pairs of one head in double, for references: load(channel) gives a value, store(channel, value) takes the
  /// turned one.
  template <class Load, class Store>
  void rotate_in_double(int64_t position, Load&& load, Store&& store) const {
    const float* c = cosines(position);
    const float* s = c + rotary_dim / 2;
    for (int64_t pair = 0; pair < rotary_dim / 2; ++pair) {
      const double x1 = load(first_channel(pair));
      const double x2 = load(second_channel(pair));
      store(first_channel(pair), x1 * double{c[pair]} - x2 * double{s[pair]});
      store(second_channel(pair), x2 * double{c[pair]} + x1 * double{s[pair]});
    }
  }
};

}  // namespace polyop
