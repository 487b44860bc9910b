#include "polyop/cpu/thread_pool.h"

#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <string_view>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace polyop::cpu {
namespace {

// A worker that finds no job spins this many pauses (about 200 us) before it sleeps: the gap between two operators of a
// decode step is some ten microseconds of Python, and a futex wake costs more than that.
constexpr int kSpinPauses = 3000;

thread_local bool inside_task = false;

// Forks between the process that loaded the library and this one. Threads do not survive them, neither a pool's workers
// nor an OpenMP team that anybody used before.
std::atomic<int> forks{0};
[[maybe_unused]] const int registered =
    pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1, std::memory_order_relaxed); });

// The pause matters most where two processors are one core's hyperthreads, as in many virtual machines: a loop without
// it takes execution slots from the caller that works. (docs/performance_cpu.md has the measurement.)
void spin_pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

int default_num_threads() {
  if (const char* value = std::getenv("POLYOP_NUM_THREADS")) {
    const int requested = std::atoi(value);
    if (requested > 0) return requested;
  }
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) return std::max(1, CPU_COUNT(&set));
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

}  // namespace

ThreadPool& ThreadPool::shared() {
  // Never destroyed: worker threads may still sleep in it when static destructors of the host process run.
  static ThreadPool* pool = new ThreadPool(default_num_threads(), Threads::kOpenMpIfLoaded);
  return *pool;
}

ThreadPool::OpenMp ThreadPool::find_openmp() {
  const char* setting = std::getenv("POLYOP_OPENMP");
  if (setting != nullptr && std::string_view(setting) == "0") return {};
  if (forks.load(std::memory_order_relaxed) > 0) return {};
  OpenMp found;
  found.parallel = reinterpret_cast<decltype(found.parallel)>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
  found.in_parallel = reinterpret_cast<decltype(found.in_parallel)>(dlsym(RTLD_DEFAULT, "omp_in_parallel"));
  return found.parallel != nullptr && found.in_parallel != nullptr ? found : OpenMp{};
}

ThreadPool::ThreadPool(int num_threads, Threads threads)
    : openmp_(threads == Threads::kOwn ? OpenMp{} : find_openmp()),
      forks_before_(forks.load(std::memory_order_relaxed)),
      num_threads_(std::max(1, num_threads)) {
  start_workers();
}

bool ThreadPool::has_lost_its_threads() const { return forks.load(std::memory_order_relaxed) != forks_before_; }

ThreadPool::~ThreadPool() { stop_workers(); }

void ThreadPool::set_num_threads(int num_threads) {
  if (has_lost_its_threads()) {  // one that is gone may hold the lock
    num_threads_ = std::max(1, num_threads);
    return;
  }
  std::lock_guard lock(job_mutex_);
  stop_workers();
  num_threads_ = std::max(1, num_threads);
  start_workers();
}

void ThreadPool::start_workers() {
  if (uses_openmp()) return;
  stopping_.store(false);
  for (int thread = 1; thread < num_threads_; ++thread) {
    workers_.emplace_back([this, thread] { worker_main(thread); });
  }
}

void ThreadPool::stop_workers() {
  if (has_lost_its_threads()) {
    for (std::thread& worker : workers_) worker.detach();
  }
  stopping_.store(true);
  job_number_.fetch_add(1, std::memory_order_release);
  job_number_.notify_all();
  for (std::thread& worker : workers_) {
    if (worker.joinable()) worker.join();
  }
  workers_.clear();
}

bool ThreadPool::claim(uint32_t job, int thread) {
  uint64_t ticket = ticket_.load(std::memory_order_acquire);
  while (true) {
    const auto unclaimed = static_cast<uint32_t>(ticket);
    if (static_cast<uint32_t>(ticket >> 32) != job || unclaimed == 0) return false;
    if (!ticket_.compare_exchange_weak(ticket, ticket - 1, std::memory_order_acq_rel)) continue;
    // The job cannot end before this task has: what it published stays valid here.
    const uint32_t task = num_tasks_.load(std::memory_order_relaxed) - unclaimed;
    inside_task = true;
    fn_(context_, first_task_ + task, thread);
    inside_task = false;
    done_.fetch_add(1, std::memory_order_release);  // shows the task's writes to the caller that waits in run_job
    return true;
  }
}

void ThreadPool::worker_main(int thread) {
  uint32_t seen = job_number_.load(std::memory_order_acquire);
  // A job may have started between the thread's creation and here: its tickets are claimed below all the same.
  while (!stopping_.load(std::memory_order_acquire)) {
    while (claim(seen, thread)) {
    }
    int spins = 0;
    uint32_t current = job_number_.load(std::memory_order_acquire);
    while (current == seen) {
      if (++spins < kSpinPauses) {
        spin_pause();
      } else {
        job_number_.wait(seen, std::memory_order_acquire);
      }
      current = job_number_.load(std::memory_order_acquire);
    }
    seen = current;
  }
}

void ThreadPool::run_job(uint32_t num_tasks) {
  done_.store(0, std::memory_order_relaxed);
  num_tasks_.store(num_tasks, std::memory_order_relaxed);
  const uint32_t job = job_number_.load(std::memory_order_relaxed) + 1;
  ticket_.store(static_cast<uint64_t>(job) << 32 | num_tasks, std::memory_order_release);
  job_number_.store(job, std::memory_order_release);
  if (uses_openmp()) {
    next_team_thread_.store(0, std::memory_order_relaxed);
    const auto team_member = [](void* context) {
      auto* pool = static_cast<ThreadPool*>(context);
      const int thread = pool->next_team_thread_.fetch_add(1, std::memory_order_relaxed);
      while (pool->claim(pool->job_number_.load(std::memory_order_relaxed), thread)) {
      }
    };
    openmp_.parallel(team_member, this, static_cast<unsigned>(num_threads_.load()), 0);
  } else {
    job_number_.notify_all();
    while (claim(job, 0)) {
    }
  }
  // An OpenMP team has met at the end of its region, but this load is what makes its writes visible by C++'s own rules.
  while (done_.load(std::memory_order_acquire) != num_tasks) spin_pause();
}

void ThreadPool::run(int64_t num_tasks, TaskFn fn, void* context) {
  if (num_tasks <= 0) return;
  const bool alone = num_tasks == 1 || num_threads_ == 1 || inside_task || has_lost_its_threads() ||
                     (uses_openmp() && openmp_.in_parallel() != 0);
  if (alone || !job_mutex_.try_lock()) {
    for (int64_t task = 0; task < num_tasks; ++task) fn(context, task, 0);
    return;
  }
  std::lock_guard lock(job_mutex_, std::adopt_lock);
  constexpr int64_t kMaxTasksPerJob = std::numeric_limits<uint32_t>::max();
  for (first_task_ = 0; first_task_ < num_tasks; first_task_ += kMaxTasksPerJob) {
    fn_ = fn;
    context_ = context;
    run_job(static_cast<uint32_t>(std::min(num_tasks - first_task_, kMaxTasksPerJob)));
  }
}

}  // namespace polyop::cpu
