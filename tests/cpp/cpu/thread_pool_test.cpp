// ThreadPool: every task runs exactly once, whoever calls, from wherever, with however many threads.
#include "polyop/cpu/thread_pool.h"

#include <dlfcn.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <numeric>
#include <thread>
#include <vector>

namespace polyop::cpu {
namespace {

/// Runs `num_tasks` tasks and returns how often each ran; plain ints, so that a race between two would be seen.
std::vector<int> counts_of(ThreadPool& pool, int64_t num_tasks) {
  std::vector<int> counts(static_cast<size_t>(num_tasks));
  pool.parallel_for(num_tasks, [&](int64_t task, int) { ++counts[static_cast<size_t>(task)]; });
  return counts;
}

bool all_once(const std::vector<int>& counts) {
  for (const int count : counts) {
    if (count != 1) return false;
  }
  return true;
}

class ThreadPoolOf : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Threads, ThreadPoolOf, ::testing::Values(1, 2, 3, 4));

TEST_P(ThreadPoolOf, EveryTask_RunsOnce) {
  ThreadPool pool(GetParam());
  EXPECT_EQ(pool.num_threads(), GetParam());
  for (const int64_t num_tasks : {0, 1, 2, 3, 7, 64, 1000}) EXPECT_TRUE(all_once(counts_of(pool, num_tasks)));
  pool.parallel_for(-3, [](int64_t, int) { FAIL() << "there is no task"; });
}

TEST_P(ThreadPoolOf, ThreadNumbers_AreInRangeAndNotSharedAtOneTime) {
  ThreadPool pool(GetParam());
  std::vector<std::atomic<int>> inside(static_cast<size_t>(GetParam()));
  std::atomic<bool> clash{false};
  pool.parallel_for(2000, [&](int64_t, int thread) {
    if (thread < 0 || thread >= GetParam() || inside[static_cast<size_t>(thread)].fetch_add(1) != 0) clash = true;
    inside[static_cast<size_t>(thread)].fetch_sub(1);
  });
  EXPECT_FALSE(clash);
}

TEST_P(ThreadPoolOf, ManyTinyJobs_SeeEachOthersWrites) {
  ThreadPool pool(GetParam());
  std::vector<int64_t> values(5, 0);
  constexpr int kJobs = 20000;
  for (int job = 0; job < kJobs; ++job) {
    // Each task reads what another task wrote in the job before.
    std::vector<int64_t> next(values.size());
    pool.parallel_for(static_cast<int64_t>(values.size()), [&](int64_t task, int) {
      next[static_cast<size_t>(task)] = values[(static_cast<size_t>(task) + 1) % values.size()] + 1;
    });
    values = next;
  }
  for (const int64_t value : values) EXPECT_EQ(value, kJobs);
}

TEST_P(ThreadPoolOf, SleepingWorkers_WakeUp) {
  ThreadPool pool(GetParam());
  for (int round = 0; round < 20; ++round) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));  // long past the spinning
    EXPECT_TRUE(all_once(counts_of(pool, 50)));
  }
}

TEST_P(ThreadPoolOf, NestedCalls_RunOnTheirCaller) {
  ThreadPool pool(GetParam());
  std::vector<int> counts(20 * 30);
  pool.parallel_for(20, [&](int64_t outer, int) {
    const std::thread::id caller = std::this_thread::get_id();
    pool.parallel_for(30, [&](int64_t inner, int thread) {
      EXPECT_EQ(std::this_thread::get_id(), caller);
      EXPECT_EQ(thread, 0);
      ++counts[static_cast<size_t>(outer * 30 + inner)];
    });
  });
  EXPECT_TRUE(all_once(counts));
}

TEST_P(ThreadPoolOf, ConcurrentCallers_EachGetAllTheirTasks) {
  ThreadPool pool(GetParam());
  std::atomic<int> wrong{0};
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&] {
      for (int job = 0; job < 500; ++job) {
        if (!all_once(counts_of(pool, 1 + job % 13))) ++wrong;
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(wrong, 0);
}

TEST(ThreadPool, SetNumThreads_WhileOthersCall) {
  ThreadPool pool(2);
  std::atomic<bool> done{false};
  std::atomic<int> wrong{0};
  std::thread caller([&] {
    while (!done) {
      if (!all_once(counts_of(pool, 40))) ++wrong;
    }
  });
  for (const int threads : {1, 4, 2, 3, 1, 2, 4, 3}) {
    pool.set_num_threads(threads);
    EXPECT_EQ(pool.num_threads(), threads);
    EXPECT_TRUE(all_once(counts_of(pool, 100)));
  }
  done = true;
  caller.join();
  EXPECT_EQ(wrong, 0);
  pool.set_num_threads(-5);
  EXPECT_EQ(pool.num_threads(), 1);
}

TEST(ThreadPool, LambdasOfEveryKind) {
  ThreadPool pool(2);
  std::atomic<int64_t> sum{0};
  const auto add = [&sum](int64_t task, int) { sum += task; };
  pool.parallel_for(10, add);
  EXPECT_EQ(sum, 45);
  auto counting = [&sum, calls = std::make_shared<std::atomic<int>>(0)](int64_t, int) mutable { sum += ++*calls; };
  pool.parallel_for(4, counting);
  EXPECT_EQ(sum, 45 + 10);
}

TEST(ThreadPool, CreatedAndDestroyed_WithoutAJob) {
  for (int round = 0; round < 50; ++round) ThreadPool pool(1 + round % 4);
}

// Threads do not survive fork(): the child must neither wait for them nor hang when it throws the pool away.
TEST(ThreadPool, ForkedChild_RunsOnItsOwn) {
  ThreadPool pool(3);
  ASSERT_TRUE(all_once(counts_of(pool, 100)));
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(20);  // a hang ends the child with a signal
    const bool fine = all_once(counts_of(pool, 1000)) && all_once(counts_of(ThreadPool::shared(), 1000));
    pool.set_num_threads(2);
    _exit(fine && all_once(counts_of(pool, 10)) ? 0 : 1);
  }
  int state = 0;
  ASSERT_EQ(waitpid(child, &state, 0), child);
  EXPECT_TRUE(WIFEXITED(state)) << "signal " << WTERMSIG(state);
  EXPECT_EQ(WEXITSTATUS(state), 0);
  EXPECT_TRUE(all_once(counts_of(pool, 100))) << "the parent goes on";
}

// An OpenMP runtime that its process has used hangs in a child, whether or not the pool existed before.
TEST(ThreadPool, MadeInAForkedChild_HasItsOwnWorkers) {
  if (void* runtime = dlopen("libgomp.so.1", RTLD_NOW | RTLD_GLOBAL)) {
    auto* parallel =
        reinterpret_cast<void (*)(void (*)(void*), void*, unsigned, unsigned)>(dlsym(runtime, "GOMP_parallel"));
    parallel([](void*) {}, nullptr, 3, 0);
  }
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(20);  // a hang ends the child with a signal
    ThreadPool pool(3, ThreadPool::Threads::kOpenMpIfLoaded);
    _exit(!pool.uses_openmp() && all_once(counts_of(pool, 1000)) ? 0 : 1);
  }
  int state = 0;
  ASSERT_EQ(waitpid(child, &state, 0), child);
  EXPECT_TRUE(WIFEXITED(state)) << "signal " << WTERMSIG(state);
  EXPECT_EQ(WEXITSTATUS(state), 0);
}

TEST(ThreadPool, Shared_IsOneForTheProcess) {
  EXPECT_EQ(&ThreadPool::shared(), &ThreadPool::shared());
  EXPECT_GE(ThreadPool::shared().num_threads(), 1);
  EXPECT_TRUE(all_once(counts_of(ThreadPool::shared(), 1000)));
}

// The barriers of libgomp are futexes that the thread sanitizer does not know: it would report the team's start and
// end.
#ifdef __SANITIZE_THREAD__
constexpr bool kKnowsOpenMp = false;
#else
constexpr bool kKnowsOpenMp = true;
#endif

// The team of an OpenMP runtime in the process does the work, and a call from inside one of its regions works alone.
TEST(ThreadPool, OpenMpRuntime_LendsItsTeam) {
  if (!kKnowsOpenMp) GTEST_SKIP() << "the thread sanitizer does not know OpenMP's barriers";
  void* runtime = dlopen("libgomp.so.1", RTLD_NOW | RTLD_GLOBAL);
  if (runtime == nullptr) GTEST_SKIP() << "this machine has no libgomp.so.1";
  ThreadPool pool(3, ThreadPool::Threads::kOpenMpIfLoaded);
  ASSERT_TRUE(pool.uses_openmp());
  for (const int64_t num_tasks : {1, 2, 3, 7, 1000}) EXPECT_TRUE(all_once(counts_of(pool, num_tasks)));
  std::vector<std::atomic<int>> inside(3);
  std::atomic<bool> clash{false};
  pool.parallel_for(2000, [&](int64_t, int thread) {
    if (thread < 0 || thread >= 3 || inside[static_cast<size_t>(thread)].fetch_add(1) != 0) clash = true;
    inside[static_cast<size_t>(thread)].fetch_sub(1);
  });
  EXPECT_FALSE(clash);
  pool.set_num_threads(2);
  EXPECT_TRUE(all_once(counts_of(pool, 100)));

  struct Region {
    ThreadPool* pool;
    std::atomic<int64_t> tasks{0};
  } region{&pool};
  auto* parallel =
      reinterpret_cast<void (*)(void (*)(void*), void*, unsigned, unsigned)>(dlsym(runtime, "GOMP_parallel"));
  parallel(
      [](void* context) {
        auto* self = static_cast<Region*>(context);
        self->pool->parallel_for(50, [&](int64_t, int thread) {
          EXPECT_EQ(thread, 0);
          ++self->tasks;
        });
      },
      &region, 2, 0);
  EXPECT_EQ(region.tasks, 100);
}

}  // namespace
}  // namespace polyop::cpu
