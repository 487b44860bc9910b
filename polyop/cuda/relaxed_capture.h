// RelaxedCapture: allocation by the host while a stream of this thread may be captured.
#pragma once

#include <cuda_runtime.h>

namespace polyop::cuda {

/// Allocation is legal beside a stream capture in this mode; nothing of it becomes part of the graph.
class RelaxedCapture {
 public:
  RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace polyop::cuda
