// Error flags: sticky marks that kernels set when a value that only the device knows (a page id, a position, a length)
// is out of range. The kernel skips the access; the host learns about it at its next check, by operand name.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "polyop/core/status.h"

namespace polyop::cuda {

/// A flag in pinned host memory that every device can write; null in a kernel that runs without one.
using ErrorFlag = volatile int32_t*;

/// The flag of one operand, made at the first call with this text ("attention: page_table"); the same address for the
/// life of the process. The first call allocates, which a stream capture allows.
ErrorFlag error_flag(std::string_view operand);

/// kInvalidArgument that names every operand whose flag was set since the last check, and clears the flags; ok when
/// none was. Waits for the current device first; not for use inside a stream capture.
Status check_error_flags();

#ifdef __CUDACC__
/// On the device: sets a flag, if there is one.
__device__ inline void raise_flag(ErrorFlag flag) {
  if (flag != nullptr) *flag = 1;
}
#endif

}  // namespace polyop::cuda
