#include "polyop/cuda/launch.h"

#include <cuda_runtime.h>

#include <array>
#include <mutex>

namespace polyop::cuda {

const DeviceNumbers& device_numbers() {
  constexpr int kMaxDevices = 64;
  static std::array<DeviceNumbers, kMaxDevices> numbers;
  static std::array<std::once_flag, kMaxDevices> read;
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device >= kMaxDevices) device = 0;
  std::call_once(read[device], [device] {
    cudaDeviceGetAttribute(&numbers[device].num_multiprocessors, cudaDevAttrMultiProcessorCount, device);
    cudaDeviceGetAttribute(&numbers[device].shared_bytes_per_block, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    cudaDeviceGetAttribute(&numbers[device].shared_bytes_per_multiprocessor,
                           cudaDevAttrMaxSharedMemoryPerMultiprocessor, device);
    int major = 0;
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    numbers[device].launches_early = major >= 9;
  });
  return numbers[device];
}

Status runtime_status(std::string_view what, int error) {
  if (error == cudaSuccess) return Status::ok();
  return {StatusCode::kCudaError, std::string(what) + ": " + cudaGetErrorString(static_cast<cudaError_t>(error))};
}

Status launch_status(std::string_view kernel) { return runtime_status(kernel, cudaGetLastError()); }

}  // namespace polyop::cuda
