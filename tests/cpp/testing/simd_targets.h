// on_every_simd_target: runs a check once on each SIMD target that this processor can execute.
#pragma once

#include <gtest/gtest.h>
#include <hwy/targets.h>

#include <cstdint>

namespace polyop::testing {

/// Calls check() with the library's run-time dispatch pinned to one target after the other.
template <class Check>
void on_every_simd_target(Check check) {
  // Only those that were compiled: for another one the dispatch would fall back to the slowest.
  const int64_t supported = hwy::SupportedTargets() & HWY_TARGETS;
  for (int64_t targets = supported; targets != 0; targets &= targets - 1) {
    const int64_t target = targets & -targets;
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().Update(target);
    SCOPED_TRACE(hwy::TargetName(target));
    check();
  }
  hwy::SetSupportedTargetsForTest(0);
  hwy::GetChosenTarget().DeInit();
}

}  // namespace polyop::testing
