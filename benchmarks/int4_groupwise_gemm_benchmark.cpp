// Times the kernels of int4_groupwise_gemm on the CPU against two roofs that it measures with the same threads: reading
// memory (few rows) and fused multiply-adds (many rows). Weights rotate through more memory than the caches hold
// ("cold") or stay
// ("warm").
//
//   int4_groupwise_gemm_benchmark            POLYOP_NUM_THREADS sets the threads, POLYOP_AMX=0 the other kernel
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "benchmarks/int4_groupwise_gemm_benchmark.cpp"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
//
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace polyop {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// 2 * lanes * chains * rounds floating-point operations.
double multiply_add_chains(int64_t rounds) {
  const hn::ScalableTag<float> df;
  const auto a = hn::Set(df, 0.5f);
  // Different starts: equal chains would be merged by the compiler.
  auto c0 = hn::Iota(df, 0.0f), c1 = c0 + a, c2 = c1 + a, c3 = c2 + a, c4 = c3 + a;
  auto c5 = c4 + a, c6 = c5 + a, c7 = c6 + a, c8 = c7 + a, c9 = c8 + a;
  for (int64_t i = 0; i < rounds; ++i) {
    c0 = hn::MulAdd(c0, a, a), c1 = hn::MulAdd(c1, a, a), c2 = hn::MulAdd(c2, a, a), c3 = hn::MulAdd(c3, a, a);
    c4 = hn::MulAdd(c4, a, a), c5 = hn::MulAdd(c5, a, a), c6 = hn::MulAdd(c6, a, a), c7 = hn::MulAdd(c7, a, a);
    c8 = hn::MulAdd(c8, a, a), c9 = hn::MulAdd(c9, a, a);
  }
  const auto sum = c0 + c1 + c2 + c3 + c4 + c5 + c6 + c7 + c8 + c9;
  return hn::GetLane(sum) > 1e30f ? 0.0 : 2.0 * static_cast<double>(hn::Lanes(df)) * 10 * static_cast<double>(rounds);
}

// Bitwise or of all 64-bit words, so that every byte is read.
uint64_t read_all(const uint64_t* words, int64_t count) {
  const hn::ScalableTag<uint64_t> du;
  const auto lanes = static_cast<int64_t>(hn::Lanes(du));
  auto a = hn::Zero(du), b = a, c = a, d = a;
  for (int64_t i = 0; i + 4 * lanes <= count; i += 4 * lanes) {
    a = hn::Or(a, hn::LoadU(du, words + i)), b = hn::Or(b, hn::LoadU(du, words + i + lanes));
    c = hn::Or(c, hn::LoadU(du, words + i + 2 * lanes)), d = hn::Or(d, hn::LoadU(du, words + i + 3 * lanes));
  }
  return hn::GetLane(hn::Or(hn::Or(a, b), hn::Or(c, d)));
}

}  // namespace HWY_NAMESPACE
}  // namespace polyop
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <random>
#include <vector>

#include "hwy/aligned_allocator.h"
#include "polyop/core/numeric_types.h"
#include "polyop/cpu/thread_pool.h"
#include "polyop/ops/int4_groupwise_gemm/int4_groupwise_gemm_problem.h"
#include "polyop/ops/int4_groupwise_gemm/packing.h"

namespace polyop {
HWY_EXPORT(multiply_add_chains);
HWY_EXPORT(read_all);

namespace {

constexpr int64_t kColdBytes = int64_t{640} << 20;  // beyond the cache share of one guest on a large server

double seconds_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Least seconds of one call in about `budget` seconds of calls.
template <class Fn>
double best_seconds(double budget, Fn&& fn) {
  double best = 1e30;
  const double end = seconds_now() + budget;
  for (int calls = 0; calls < 3 || seconds_now() < end; ++calls) {
    const double start = seconds_now();
    fn();
    best = std::min(best, seconds_now() - start);
  }
  return best;
}

double measure_read_bytes_per_second(const std::vector<uint64_t>& memory) {
  cpu::ThreadPool& pool = cpu::ThreadPool::shared();
  const int64_t tasks = 8 * pool.num_threads();
  const int64_t words = static_cast<int64_t>(memory.size()) / tasks;
  volatile uint64_t sink = 0;
  const double seconds = best_seconds(1.0, [&] {
    pool.parallel_for(
        tasks, [&](int64_t task, int) { sink = HWY_DYNAMIC_DISPATCH(read_all)(memory.data() + task * words, words); });
  });
  return static_cast<double>(tasks * words * 8) / seconds;
}

double measure_flops() {
  cpu::ThreadPool& pool = cpu::ThreadPool::shared();
  std::vector<double> flops(pool.num_threads());
  const double seconds = best_seconds(0.1, [&] {
    pool.parallel_for(pool.num_threads(),
                      [&](int64_t task, int) { flops[task] = HWY_DYNAMIC_DISPATCH(multiply_add_chains)(20'000); });
  });
  double total = 0.0;
  for (double value : flops) total += value;
  return total / seconds;
}

void time_shape(int64_t m, int64_t n, int64_t k, int64_t group_size, bool cold, double read_roof) {
  std::mt19937 random(1);
  const int64_t weight_bytes = int4_fragment_rows(n, k) * kFragmentRowBytes;
  const int64_t groups = (k + group_size - 1) / group_size;
  const int64_t copies = cold ? std::max<int64_t>(1, kColdBytes / weight_bytes) : 1;
  std::vector<uint8_t> weights(copies * weight_bytes);
  for (size_t i = 0; i < weights.size(); i += 4) {
    const uint32_t word = random();
    for (size_t b = 0; b < 4; ++b) weights[i + b] = static_cast<uint8_t>(word >> 8 * b);
  }
  std::vector<F16> scales(copies * groups * n, F16::from_float(0.01f));
  std::vector<float> x(m * k);
  for (float& value : x) value = static_cast<float>(random() % 2048) / 1024.0f - 1.0f;
  std::vector<float> out(m * n);
  Int4GroupwiseGemmProblem problem;
  problem.m = m, problem.n = n, problem.k = k, problem.group_size = group_size;
  problem.x = x.data(), problem.x_rows = RowAxes::of(m, k);
  problem.scales_row_stride = n;
  problem.out = out.data(), problem.out_rows = RowAxes::of(m, n);
  const bool amx = cpu::supports_int4_groupwise_gemm_amx(problem).is_ok();
  const auto launch = amx ? cpu::int4_groupwise_gemm_amx : cpu::int4_groupwise_gemm_simd;
  const int64_t bytes = amx ? cpu::int4_groupwise_gemm_amx_workspace_bytes(problem)
                            : cpu::int4_groupwise_gemm_simd_workspace_bytes(problem);
  const auto memory = hwy::AllocateAligned<uint8_t>(bytes);
  int64_t copy = 0;
  const double seconds = best_seconds(0.5, [&] {
    problem.qweight = weights.data() + copy * weight_bytes;
    problem.scales = scales.data() + copy * groups * n;
    copy = (copy + 1) % copies;
    if (!launch(problem, {memory.get(), bytes}, {}).is_ok()) std::printf("failed\n");
  });
  const double flops_roof = measure_flops();  // beside the call it judges: clocks move with the load of the machine
  const double flops = 2.0 * static_cast<double>(m * n * k) / seconds;
  const double rate = static_cast<double>(weight_bytes) / seconds;
  std::printf(
      "%s %5ld %6ld %6ld %4ld %s %10.1f us %7.1f GFLOP/s %4.0f %% of FMA %7.2f GB/s of weights %4.0f %% of read\n",
      amx ? "amx " : "simd", static_cast<long>(m), static_cast<long>(n), static_cast<long>(k),
      static_cast<long>(group_size), cold ? "cold" : "warm", seconds * 1e6, flops / 1e9, 100 * flops / flops_roof,
      rate / 1e9, 100 * rate / read_roof);
  std::fflush(stdout);
}

void run_all() {
  double read_roof = 0.0;
  {
    const std::vector<uint64_t> memory(kColdBytes / 8, 1);
    read_roof = measure_read_bytes_per_second(memory);
  }
  std::printf("%d threads: read %.1f GB/s, FMA %.1f GFLOP/s\n         M      N      K   Kg\n",
              cpu::ThreadPool::shared().num_threads(), read_roof / 1e9, measure_flops() / 1e9);
  for (const int64_t group_size : {32, 64, 128}) {
    for (const bool cold : {true, false}) time_shape(1, 4096, 4096, group_size, cold, read_roof);
    time_shape(4, 4096, 4096, group_size, true, read_roof);
    time_shape(8, 4096, 4096, group_size, true, read_roof);
    time_shape(256, 4096, 4096, group_size, false, read_roof);
  }
  constexpr int64_t kSmallModelShapes[][2] = {{960, 576}, {576, 576}, {3072, 576}, {576, 1536}};
  for (const auto& [n, k] : kSmallModelShapes) {
    for (const int64_t m : {1, 3, 8, 9, 256}) time_shape(m, n, k, 32, false, read_roof);
  }
}

}  // namespace
}  // namespace polyop

int main() { polyop::run_all(); }
#endif  // HWY_ONCE
