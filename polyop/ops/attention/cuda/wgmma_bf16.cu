#include "polyop/ops/attention/cuda/wgmma_launch.cuh"

namespace polyop::cuda {

template Status launch_wgmma<__nv_bfloat16, 64>(const AttentionProblem&, const SplitPlan&, const SplitScratch&, int,
                                                int, Stream);
template Status launch_wgmma<__nv_bfloat16, 128>(const AttentionProblem&, const SplitPlan&, const SplitScratch&, int,
                                                 int, Stream);

}  // namespace polyop::cuda
