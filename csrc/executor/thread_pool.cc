#include "executor/thread_pool.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <exception>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "support/error.h"

namespace headrace {

namespace {

// About 20 us: longer than the gaps between the parallel ops of a decode step, short against a wait for the disk.
// The machine may be shared, so nobody spins longer.
constexpr int kSpins = 1000;
constexpr uint32_t kMaxThreads = 1024;

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("isb");  // yield does nothing on most processors
#endif
}

// Returns the first value seen that is not `old`.
uint32_t wait_for_change(const std::atomic<uint32_t>& word, uint32_t old) {
  for (int i = 0; i < kSpins; ++i) {
    uint32_t now = word.load(std::memory_order_acquire);
    if (now != old) return now;
    pause();
  }
  word.wait(old, std::memory_order_acquire);
  return word.load(std::memory_order_acquire);
}

}  // namespace

struct ThreadPool::Impl {
  // One word says everything: whether a job is open, how many workers are in it, and which job it is. A worker that
  // wakes late finds the job closed and nobody waited for it.
  static constexpr uint32_t kOpen = 1u << 31, kActive = 1, kActiveMask = kMaxThreads * 2 - 1, kJob = kActiveMask + 1;
  alignas(64) std::atomic<uint32_t> state{0};
  alignas(64) std::atomic<uint32_t> next{0};  // first item that nobody has claimed
  std::atomic<bool> stopping{false};

  // The job; written while it is closed and no worker is in it.
  const std::function<void(uint32_t, uint32_t, uint32_t)>* fn = nullptr;
  uint32_t count = 0, grain = 1, num_threads = 1;

  const pid_t pid = getpid();
  std::mutex error_mutex;
  std::exception_ptr error;
  std::vector<std::thread> workers;

  // Large pieces first, small ones last: few claims, and all threads end at nearly the same time.
  bool claim(uint32_t& begin, uint32_t& end) {
    begin = next.load(std::memory_order_relaxed);
    do {
      if (begin >= count) return false;
      uint32_t left = count - begin;
      uint32_t size = std::max(grain, left / 3 * 2 / num_threads);
      end = left < size + grain ? count : begin + size;  // no remainder below the grain
    } while (!next.compare_exchange_weak(begin, end, std::memory_order_relaxed));
    return true;
  }

  void work(uint32_t thread) {
    uint32_t begin, end;
    try {
      while (claim(begin, end)) (*fn)(begin, end, thread);
    } catch (...) {
      std::lock_guard lock(error_mutex);
      if (!error) error = std::current_exception();
      next.store(count, std::memory_order_relaxed);  // the others need not go on
    }
  }

  void worker(uint32_t thread) {
    std::fesetenv(FE_DFL_ENV);  // a thread inherits its maker's rounding mode
    uint32_t seen = state.load(std::memory_order_acquire);
    while (!stopping.load(std::memory_order_acquire)) {
      if (!(seen & kOpen)) {
        seen = wait_for_change(state, seen);
      } else if (state.compare_exchange_weak(seen, seen + kActive, std::memory_order_acquire)) {
        uint32_t job = seen & ~kActiveMask;
        work(thread);
        seen = state.fetch_sub(kActive, std::memory_order_acq_rel) - kActive;
        if (!(seen & kOpen) && !(seen & kActiveMask)) state.notify_all();
        // The job is exhausted: do not enter it again, wait for it to be closed or replaced.
        while ((seen & ~kActiveMask) == job && !stopping.load(std::memory_order_acquire))
          seen = wait_for_change(state, seen);
      }
    }
  }

  void stop_and_join() {
    stopping.store(true, std::memory_order_release);
    state.fetch_add(kJob, std::memory_order_acq_rel);
    state.notify_all();
    for (std::thread& worker : workers) worker.join();
  }
};

ThreadPool::ThreadPool(uint32_t num_threads) : impl_(new Impl) {
  if (num_threads < 1 || num_threads > kMaxThreads)
    throw Error("thread pool: " + std::to_string(num_threads) + " threads, expected 1 to " +
                std::to_string(kMaxThreads));
  impl_->num_threads = num_threads;
  impl_->workers.reserve(num_threads);
  try {
    for (uint32_t t = 1; t < num_threads; ++t)
      impl_->workers.emplace_back([impl = impl_.get(), t] { impl->worker(t); });
  } catch (const std::system_error& e) {
    impl_->stop_and_join();
    throw Error("thread pool: the system refused thread " + std::to_string(impl_->workers.size() + 1) + " of " +
                std::to_string(num_threads) + ": " + e.what() + "; use fewer threads (-t)");
  }
}

ThreadPool::~ThreadPool() {
  if (getpid() == impl_->pid) {
    impl_->stop_and_join();
  } else {
    (void)impl_.release();  // in a forked child the threads do not exist, and their handles must not be touched
  }
}

uint32_t ThreadPool::size() const { return impl_->num_threads; }

void ThreadPool::parallel_for(uint32_t count, uint32_t grain,
                              const std::function<void(uint32_t, uint32_t, uint32_t)>& fn) {
  if (count == 0) return;
  grain = std::max(grain, 1u);
  Impl& pool = *impl_;
  pool.fn = &fn;
  pool.count = count;
  pool.grain = grain;
  pool.next.store(0, std::memory_order_relaxed);
  bool shared = pool.num_threads > 1 && count >= 2 * uint64_t{grain};
  if (shared) {
    uint32_t closed = pool.state.load(std::memory_order_relaxed);
    pool.state.store(((closed + Impl::kJob) & ~Impl::kOpen) | Impl::kOpen, std::memory_order_release);
    pool.state.notify_all();
  }
  pool.work(0);
  if (shared) {
    uint32_t seen = pool.state.fetch_and(~Impl::kOpen, std::memory_order_acq_rel) & ~Impl::kOpen;
    while (seen & Impl::kActiveMask) seen = wait_for_change(pool.state, seen);
  }
  if (pool.error) std::rethrow_exception(std::exchange(pool.error, nullptr));
}

}  // namespace headrace
