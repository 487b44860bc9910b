// What launch functions share: the device's numbers, and the Status of a launch.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "polyop/core/kernel_list.h"
#include "polyop/core/status.h"

struct CUstream_st;

namespace polyop::cuda {

/// Numbers of the current device, read once for each device.
struct DeviceNumbers {
  int num_multiprocessors = 1;
  int shared_bytes_per_block = 48 * 1024;  // dynamic shared memory a block may ask for
  int shared_bytes_per_multiprocessor = 64 * 1024;
  bool launches_early = false;  // has programmatic dependent launch: sm_90 or newer
};
const DeviceNumbers& device_numbers();

/// The stream a kernel is launched into.
inline CUstream_st* stream_of(Stream stream) { return static_cast<CUstream_st*>(stream.handle); }

/// Ok, or kCudaError with the runtime's text when the launch just made was refused.
Status launch_status(std::string_view kernel);

/// kCudaError when a runtime call failed; `error` is a cudaError_t.
Status runtime_status(std::string_view what, int error);

/// Blocks of `threads` that cover `items`, at most `most` (a grid-stride loop does the rest); at least 1.
inline int64_t blocks_for(int64_t items, int64_t per_block, int64_t most) {
  const int64_t blocks = (items + per_block - 1) / per_block;
  return blocks < 1 ? 1 : (blocks < most ? blocks : most);
}

}  // namespace polyop::cuda
