// The packing functions as operators, for hosts that know operators only.
#pragma once

#include <memory>

#include "polyop/core/op_registry.h"

namespace polyop {

/// q u8 [N, K] -> packed i8 [ceil(N / 128) * ceil(K / 64) * 8, 512]: pack_int4_fragments of packing.h.
std::unique_ptr<Operator> make_pack_int4_fragments_operator();

/// packed, n, k -> q u8 [N, K]: unpack_int4_fragments of packing.h.
std::unique_ptr<Operator> make_unpack_int4_fragments_operator();

}  // namespace polyop
