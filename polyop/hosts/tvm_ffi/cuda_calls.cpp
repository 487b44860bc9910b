#include "polyop/hosts/tvm_ffi/cuda_calls.h"

#include <string>

#ifdef POLYOP_CUDA
#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <map>
#include <mutex>
#include <utility>

#include "polyop/cuda/error_flags.h"
#include "polyop/cuda/launch.h"
#include "polyop/cuda/relaxed_capture.h"
#include "polyop/cuda/workspace.h"
#endif

namespace polyop::tvm_ffi_host {

#ifdef POLYOP_CUDA

namespace {

using cuda::runtime_status;

class DeviceGuard {
 public:
  DeviceGuard() = default;
  ~DeviceGuard() {
    if (switched_) cudaSetDevice(previous_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

  Status enter(int device) {
    POLYOP_RETURN_IF_ERROR(runtime_status("cudaGetDevice", cudaGetDevice(&previous_)));
    if (previous_ == device) return Status::ok();
    POLYOP_RETURN_IF_ERROR(runtime_status("cudaSetDevice", cudaSetDevice(device)));
    switched_ = true;
    return Status::ok();
  }

 private:
  int previous_ = 0;
  bool switched_ = false;
};

/// Scratch memory of every (device, stream) of the process; polyop/cuda/workspace.h says what kernels may expect of it.
class StreamWorkspaces {
 public:
  Status acquire(int device, cudaStream_t stream, int64_t bytes, Workspace* workspace) {
    const std::lock_guard lock(mutex_);
    Workspace& held = workspaces_[{device, stream}];
    if (held.bytes < bytes) POLYOP_RETURN_IF_ERROR(grow(bytes, &held));
    *workspace = held;
    return Status::ok();
  }

 private:
  static Status grow(int64_t bytes, Workspace* held) {
    constexpr int64_t kLeastBytes = int64_t{8} << 20;  // most decode steps: growth is rare after the first call
    const cuda::RelaxedCapture relaxed;
    const int64_t wanted = std::max({bytes, kLeastBytes, 2 * held->bytes});
    void* data = nullptr;
    if (cudaMalloc(&data, static_cast<size_t>(wanted)) != cudaSuccess) {
      static_cast<void>(cudaGetLastError());
      return resource_exhausted("no device memory for " + std::to_string(wanted) + " bytes of workspace");
    }
    cudaStream_t own = nullptr;  // not the caller's: that one may be capturing
    POLYOP_RETURN_IF_ERROR(runtime_status("workspace", cudaStreamCreateWithFlags(&own, cudaStreamNonBlocking)));
    cudaError_t error = cudaMemsetAsync(data, 0, cuda::kSemaphoreBytes, own);
    if (error == cudaSuccess) error = cudaStreamSynchronize(own);
    cudaStreamDestroy(own);
    POLYOP_RETURN_IF_ERROR(runtime_status("workspace", error));
    *held = {.data = data, .bytes = wanted};  // the old block stays: a graph may use it
    return Status::ok();
  }

  std::mutex mutex_;
  std::map<std::pair<int, cudaStream_t>, Workspace> workspaces_;
};

StreamWorkspaces& stream_workspaces() {
  static auto* instance = new StreamWorkspaces;  // never destroyed: the CUDA runtime may be gone before it
  return *instance;
}

class CallWorkspaces final : public WorkspaceProvider {
 public:
  explicit CallWorkspaces(Stream stream) : stream_(stream) {}
  Status acquire(Device device, int64_t bytes, Workspace* workspace) override {
    return stream_workspaces().acquire(device.index, cuda::stream_of(stream_), bytes, workspace);
  }

 private:
  Stream stream_;
};

/// Ok, or why the kernels cannot run on this GPU; asked once for each device.
Status check_capability(int device) {
  constexpr int kMaxDevices = 64;
  static std::array<std::once_flag, kMaxDevices> asked;
  static std::array<std::string, kMaxDevices> refusals;
  if (device < 0 || device >= kMaxDevices) return unsupported("cuda:" + std::to_string(device) + " is not a device");
  std::call_once(asked[device], [device] {
    cudaDeviceProp properties{};
    if (const cudaError_t error = cudaGetDeviceProperties(&properties, device); error != cudaSuccess) {
      refusals[device] = "cuda:" + std::to_string(device) + ": " + cudaGetErrorString(error);
    } else if (properties.major < 8) {
      refusals[device] = "cuda:" + std::to_string(device) + " (" + properties.name + ") has compute capability " +
                         std::to_string(properties.major) + "." + std::to_string(properties.minor) +
                         "; the CUDA kernels need 8.0 or newer";
    }
  });
  return refusals[device].empty() ? Status::ok() : unsupported(refusals[device]);
}

}  // namespace

Status run_on_cuda(const Operator& op, const BoundCall& call, Stream stream, std::string_view kernel) {
  POLYOP_RETURN_IF_ERROR(check_capability(call.device.index));
  DeviceGuard guard;
  POLYOP_RETURN_IF_ERROR(guard.enter(call.device.index));
  CallWorkspaces workspaces(stream);
  return op.run(call, workspaces, stream, kernel);
}

Status check_cuda_errors() { return cuda::check_error_flags(); }

#else

Status run_on_cuda(const Operator& op, const BoundCall&, Stream, std::string_view) {
  return unsupported(op.schema().name() + ": the library was built without CUDA kernels (preset 'cuda')");
}

Status check_cuda_errors() { return unsupported("the library was built without CUDA kernels (preset 'cuda')"); }

#endif

}  // namespace polyop::tvm_ffi_host
