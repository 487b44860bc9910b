#include "polyop/ops/attention/cuda/split_kv_launch.cuh"

namespace polyop::cuda {

template Status launch_split_kv<__half, __half, 192>(const AttentionProblem&, const SplitPlan&, const SplitScratch&,
                                                     RowKind, int, int, Stream);

}  // namespace polyop::cuda
