// Times the CPU kernels of attention beside each other: causal prefill by its arithmetic, decode by the bytes of k and
// v that it reads. Pages of 16 keys lie in random order.
//
//   attention_benchmark [kernel [row of kShapes [dtype]]]    POLYOP_NUM_THREADS sets the threads
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <new>
#include <numeric>
#include <random>
#include <string_view>
#include <vector>

#include "polyop/core/numeric_types.h"
#include "polyop/cpu/thread_pool.h"
#include "polyop/ops/attention/attention_kernels.h"

namespace polyop {
namespace {

constexpr int64_t kPageSize = 16;
constexpr double kSecondsPerCase = 1.0;

double seconds_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

struct Shape {
  int64_t sequences;
  int64_t queries;  // rows of each sequence, at the end of its keys
  int64_t length;   // keys of each sequence
  int64_t query_heads;
  int64_t kv_heads;
  int64_t head_dim;
};

template <class T>
std::vector<T> random_elements(int64_t count, std::mt19937& random) {
  std::vector<T> elements(static_cast<size_t>(count));
  for (T& element : elements) element = from_float<T>(static_cast<float>(random() % 4096) / 2048.0f - 1.0f);
  return elements;
}

template <class T>
void time_shape(const Shape& shape, const Kernel<AttentionProblem>& kernel) {
  std::mt19937 random(1);
  const int64_t width = (shape.length + kPageSize - 1) / kPageSize;
  const int64_t pages = shape.sequences * width;
  const int64_t rows = shape.sequences * shape.queries;
  std::vector<T> q = random_elements<T>(rows * shape.query_heads * shape.head_dim, random);
  std::vector<T> k = random_elements<T>(pages * kPageSize * shape.kv_heads * shape.head_dim, random);
  std::vector<T> v = random_elements<T>(pages * kPageSize * shape.kv_heads * shape.head_dim, random);
  std::vector<T> out(q.size());
  std::vector<int32_t> page_table(static_cast<size_t>(pages));
  std::iota(page_table.begin(), page_table.end(), 0);
  std::shuffle(page_table.begin(), page_table.end(), random);
  std::vector<int32_t> offsets;
  for (int64_t b = 0; b <= shape.sequences; ++b) offsets.push_back(static_cast<int32_t>(b * shape.queries));
  const std::vector<int32_t> lengths(static_cast<size_t>(shape.sequences), static_cast<int32_t>(shape.length));

  AttentionProblem problem;
  problem.num_sequences = shape.sequences;
  problem.num_query_heads = shape.query_heads;
  problem.num_kv_heads = shape.kv_heads;
  problem.head_dim = problem.value_head_dim = shape.head_dim;
  problem.num_query_rows = rows;
  problem.query_offsets = offsets.data();
  problem.q = {q.data(), kDTypeOf<T>, 0, shape.query_heads * shape.head_dim, shape.head_dim};
  problem.out = problem.q;
  problem.out.data = out.data();
  const int64_t row_stride = shape.kv_heads * shape.head_dim;
  problem.k = {k.data(), kDTypeOf<T>, kPageSize * row_stride, row_stride, shape.head_dim};
  problem.v = problem.k;
  problem.v.data = v.data();
  problem.kv_lengths = lengths.data();
  problem.kv_capacity = width * kPageSize;
  problem.page_table = page_table.data();
  problem.page_table_stride = width;
  problem.page_size = kPageSize;
  problem.num_pages = pages;
  problem.scale = 1.0f / std::sqrt(static_cast<float>(shape.head_dim));

  if (!kernel.supports(problem).is_ok()) return;
  const int64_t bytes = kernel.workspace_bytes(problem);
  const auto release = [](std::byte* p) { ::operator delete[](p, std::align_val_t{kWorkspaceAlignment}); };
  const std::unique_ptr<std::byte[], decltype(release)> workspace(
      static_cast<std::byte*>(::operator new[](static_cast<size_t>(bytes), std::align_val_t{kWorkspaceAlignment})),
      release);
  double best = 1e30;
  const double end = seconds_now() + kSecondsPerCase;
  for (int calls = 0; calls < 3 || seconds_now() < end; ++calls) {
    const double start = seconds_now();
    if (!kernel.launch(problem, {workspace.get(), bytes}, {}).is_ok()) std::printf("failed\n");
    best = std::min(best, seconds_now() - start);
  }

  const auto visible = static_cast<double>(shape.queries * shape.length - shape.queries * (shape.queries - 1) / 2);
  const double flops = 4.0 * static_cast<double>(shape.sequences * shape.query_heads * shape.head_dim) * visible;
  const double read = 2.0 * static_cast<double>(shape.sequences * shape.length * row_stride) * sizeof(T);
  std::printf("%-20s %4s %3ld %6ld %6ld %5ld/%-3ld %4ld %11.1f us %7.1f GFLOP/s %7.2f GB/s of k and v\n",
              kernel.name.data(), dtype_name(kDTypeOf<T>).data(), static_cast<long>(shape.sequences),
              static_cast<long>(shape.queries), static_cast<long>(shape.length), static_cast<long>(shape.query_heads),
              static_cast<long>(shape.kv_heads), static_cast<long>(shape.head_dim), best * 1e6, flops / best * 1e-9,
              read / best * 1e-9);
  std::fflush(stdout);
}

void run(std::string_view kernel_name, int shape_index, std::string_view dtype) {
  std::printf("%d threads\n%20s      B      S      L    Hq/Hkv    D\n", cpu::ThreadPool::shared().num_threads(), "");
  constexpr Shape kShapes[] = {{1, 512, 512, 9, 3, 64},  {1, 1024, 1024, 32, 8, 128}, {1, 64, 4096, 32, 8, 128},
                               {1, 1, 1024, 9, 3, 64},   {1, 1, 8192, 9, 3, 64},      {1, 1, 1024, 32, 8, 128},
                               {1, 1, 8192, 32, 8, 128}, {8, 1, 8192, 32, 8, 128}};
  int index = 0;
  for (const Shape& shape : kShapes) {
    if (shape_index >= 0 && index++ != shape_index) continue;
    for (const Kernel<AttentionProblem>& kernel : attention_kernels()) {
      const bool is_wanted = kernel_name.empty() ? kernel.name != "reference" : kernel.name == kernel_name;
      if (!is_wanted || kernel.device != DeviceType::kCpu) continue;
      if (dtype.empty() || dtype == "f32") time_shape<float>(shape, kernel);
      if (dtype.empty() || dtype == "bf16") time_shape<BF16>(shape, kernel);
      if (dtype.empty() || dtype == "f16") time_shape<F16>(shape, kernel);
    }
  }
}

}  // namespace
}  // namespace polyop

int main(int argc, char** argv) {
  polyop::run(argc > 1 ? argv[1] : "", argc > 2 ? std::atoi(argv[2]) : -1, argc > 3 ? argv[3] : "");
}
