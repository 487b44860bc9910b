// Scratch memory on CUDA devices starts with counters: the first kSemaphoreBytes of a Workspace are zero when a kernel
// starts and zero again when it ends, so that a captured graph can be replayed. What follows them is undefined. A
// kernel that asks for scratch memory counts them in.
#pragma once

#include <cstdint>

#include "polyop/core/kernel_list.h"

namespace polyop::cuda {

inline constexpr int64_t kNumSemaphores = 65536;
inline constexpr int64_t kSemaphoreBytes = kNumSemaphores * static_cast<int64_t>(sizeof(uint32_t));

inline uint32_t* semaphores(Workspace workspace) { return static_cast<uint32_t*>(workspace.data); }
inline void* scratch(Workspace workspace) { return static_cast<char*>(workspace.data) + kSemaphoreBytes; }

}  // namespace polyop::cuda
