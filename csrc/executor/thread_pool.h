// The executor's own threads. The caller is thread 0; the others wait (spinning shortly, then asleep) between jobs.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

namespace headrace {

class ThreadPool {
 public:
  explicit ThreadPool(uint32_t num_threads);  // >= 1
  ~ThreadPool();
  uint32_t size() const;
  // Calls fn(begin, end, thread) over [0, count) in chunks of at least `grain`, on all threads, and returns when all
  // are done. The first exception is rethrown here. Results must not depend on the division.
  void parallel_for(uint32_t count, uint32_t grain,
                    const std::function<void(uint32_t begin, uint32_t end, uint32_t thread)>& fn);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace headrace
