// ThreadPool: the one pool of CPU threads that every CPU kernel of the library shares.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

namespace polyop::cpu {

/// Runs numbered tasks on a fixed number of threads. Tasks are claimed in ascending order, so put the longest first.
/// Which thread runs a task is not fixed: results must not depend on it. A call from inside a task, from a second
/// thread while the pool is busy, or in a forked child that inherited the pool runs its tasks on the caller alone.
///
/// In a process with an OpenMP runtime (PyTorch brings one) the threads are those of its team: a worker that has just
/// left a loop of torch spins for milliseconds, and workers of our own would share its processor. Elsewhere, and with
/// POLYOP_OPENMP=0 or made after a fork, the pool has its own workers.
class ThreadPool {
 public:
  enum class Threads : uint8_t { kOwn, kOpenMpIfLoaded };

  /// The process-wide pool: POLYOP_NUM_THREADS threads, else one for each processor this process may run on. An OpenMP
  /// runtime counts when it is loaded before the first call.
  static ThreadPool& shared();

  explicit ThreadPool(int num_threads, Threads threads = Threads::kOwn);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  /// Threads that may run tasks, the caller included. Scratch per thread is sized by this.
  [[nodiscard]] int num_threads() const { return num_threads_; }

  /// Whether the threads are those of an OpenMP runtime.
  [[nodiscard]] bool uses_openmp() const { return openmp_.parallel != nullptr; }

  /// Changes the number of threads (at least 1). Waits for a running job, so not for use inside a task. Not while a
  /// kernel runs in another thread either: kernels cut their scratch for the number that they have read.
  void set_num_threads(int num_threads);

  /// Calls fn(task, thread) for each task in [0, num_tasks), thread in [0, num_threads()); returns when all are done.
  /// What the tasks wrote is visible to the caller.
  template <class Fn>
  void parallel_for(int64_t num_tasks, Fn&& fn) {
    using Function = std::remove_reference_t<Fn>;
    run(
        num_tasks, [](void* context, int64_t task, int thread) { (*static_cast<Function*>(context))(task, thread); },
        const_cast<std::remove_const_t<Function>*>(&fn));
  }

 private:
  using TaskFn = void (*)(void* context, int64_t task, int thread);

  // Entry points that every OpenMP runtime for GCC's code has (libgomp; LLVM's and Intel's under the same names).
  struct OpenMp {
    void (*parallel)(void (*body)(void*), void* context, unsigned num_threads, unsigned flags) = nullptr;
    int (*in_parallel)() = nullptr;
  };
  static OpenMp find_openmp();

  void run(int64_t num_tasks, TaskFn fn, void* context);
  void run_job(uint32_t num_tasks);
  void start_workers();
  void stop_workers();
  void worker_main(int thread);
  bool claim(uint32_t job, int thread);
  [[nodiscard]] bool has_lost_its_threads() const;

  OpenMp openmp_;
  int forks_before_;  // the pool was made
  std::atomic<int> num_threads_{1};
  std::vector<std::thread> workers_;
  std::mutex job_mutex_;  // held by the caller whose job runs

  // A job is its number and how many tasks are unclaimed, in one word: a late worker can never claim from a newer job.
  alignas(64) std::atomic<uint64_t> ticket_{0};      // job << 32 | unclaimed tasks
  alignas(64) std::atomic<uint32_t> job_number_{0};  // workers sleep on this
  alignas(64) std::atomic<uint32_t> done_{0};        // finished tasks of the running job
  std::atomic<bool> stopping_{false};
  std::atomic<uint32_t> num_tasks_{0};
  std::atomic<int> next_team_thread_{0};  // numbers the members of an OpenMP team
  TaskFn fn_ = nullptr;
  void* context_ = nullptr;
  int64_t first_task_ = 0;
};

}  // namespace polyop::cpu
