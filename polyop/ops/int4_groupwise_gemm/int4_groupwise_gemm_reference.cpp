#include "polyop/core/dispatch.h"
#include "polyop/ops/int4_groupwise_gemm/int4_groupwise_gemm_problem.h"
#include "polyop/ops/int4_groupwise_gemm/packing.h"

namespace polyop {

Status int4_groupwise_gemm_reference(const Int4GroupwiseGemmProblem& problem, Workspace, Stream) {
  return visit_dtypes<float, F16, BF16>(problem.x_dtype, [&]<class T> {
    return visit_dtypes<float, F16, BF16>(problem.scales_dtype, [&]<class S> {
      const int64_t depth_blocks = (problem.k + kFragmentDepth - 1) / kFragmentDepth;
      for (int64_t row = 0; row < problem.m; ++row) {
        const T* x = static_cast<const T*>(problem.x) + problem.x_rows.offset(row);
        T* out = static_cast<T*>(problem.out) + problem.out_rows.offset(row);
        for (int64_t column = 0; column < problem.n; ++column) {
          double sum = 0.0;
          for (int64_t depth = 0; depth < problem.k; ++depth) {
            const NibbleAddress at = int4_fragment_address(column, depth, depth_blocks);
            const int weight = (problem.qweight[at.byte] >> at.shift & 0xf) - kInt4Bias;
            const S* scales =
                static_cast<const S*>(problem.scales) + depth / problem.group_size * problem.scales_row_stride;
            sum += static_cast<double>(to_float(x[depth])) * weight * static_cast<double>(to_float(scales[column]));
          }
          out[column] = from_float<T>(static_cast<float>(sum));
        }
      }
    });
  });
}

}  // namespace polyop
