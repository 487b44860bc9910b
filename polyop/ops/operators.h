// The operators that this library ships.
#pragma once

#include "polyop/core/op_registry.h"

namespace polyop {

/// All operators, built at the first call; safe from any thread.
const OpRegistry& operators();

}  // namespace polyop
