// Rotary embedding on the device: one pair of channels.
#pragma once

namespace polyop::cuda {

/// (x1, x2) turned by the angle with cosine c and sine s: one product rounded, the other fused into the sum.
__device__ inline void rotate_pair(float x1, float x2, float c, float s, float* y1, float* y2) {
  *y1 = fmaf(x1, c, -__fmul_rn(x2, s));
  *y2 = fmaf(x2, c, __fmul_rn(x1, s));
}

}  // namespace polyop::cuda
