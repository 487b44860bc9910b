#include "polyop/cuda/error_flags.h"

#include <cuda_runtime.h>

#include <array>
#include <mutex>

#include "polyop/cuda/relaxed_capture.h"

namespace polyop::cuda {
namespace {

constexpr int kMaxFlags = 256;

struct Flags {
  std::mutex mutex;
  volatile int32_t* marks = nullptr;  // [kMaxFlags], pinned
  std::array<std::string, kMaxFlags> operands;
  int count = 0;
};

Flags& flags() {
  static Flags instance;
  return instance;
}

}  // namespace

ErrorFlag error_flag(std::string_view operand) {
  Flags& all = flags();
  const std::lock_guard lock(all.mutex);
  for (int i = 0; i < all.count; ++i) {
    if (all.operands[i] == operand) return all.marks + i;
  }
  if (all.marks == nullptr) {
    void* memory = nullptr;
    const RelaxedCapture relaxed;
    if (cudaHostAlloc(&memory, kMaxFlags * sizeof(int32_t), cudaHostAllocPortable | cudaHostAllocMapped) !=
        cudaSuccess) {
      return nullptr;  // the launch that follows reports the device's error
    }
    all.marks = static_cast<volatile int32_t*>(memory);
    for (int i = 0; i < kMaxFlags; ++i) all.marks[i] = 0;
  }
  if (all.count == kMaxFlags) return nullptr;
  all.operands[all.count] = operand;
  return all.marks + all.count++;
}

Status check_error_flags() {
  if (const cudaError_t error = cudaDeviceSynchronize(); error != cudaSuccess) {
    return {StatusCode::kCudaError, std::string("check_errors: ") + cudaGetErrorString(error)};
  }
  Flags& all = flags();
  const std::lock_guard lock(all.mutex);
  std::string text;
  for (int i = 0; i < all.count; ++i) {
    if (all.marks[i] == 0) continue;
    all.marks[i] = 0;
    text +=
        (text.empty() ? "" : "; ") + all.operands[i] + " holds a value outside its range; the accesses were skipped";
  }
  return text.empty() ? Status::ok() : invalid_argument(std::move(text));
}

}  // namespace polyop::cuda
