#include "polyop/ops/attention/cuda/wgmma_launch.cuh"

namespace polyop::cuda {

template Status launch_wgmma<__half, 64>(const AttentionProblem&, const SplitPlan&, const SplitScratch&, int, int,
                                         Stream);
template Status launch_wgmma<__half, 128>(const AttentionProblem&, const SplitPlan&, const SplitScratch&, int, int,
                                          Stream);

template bool wgmma_is_built<__half, 128>();

}  // namespace polyop::cuda
