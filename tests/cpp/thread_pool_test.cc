#include "executor/thread_pool.h"

#include <atomic>
#include <numeric>
#include <stdexcept>
#include <thread>
#include <vector>

#include "check.h"
#include "support/error.h"

using namespace headrace;

TEST("every item exactly once, in pieces of at least the grain") {
  for (uint32_t threads = 1; threads <= 4; ++threads) {
    ThreadPool pool(threads);
    CHECK_EQ(pool.size(), threads);
    for (uint32_t count : {0u, 1u, 2u, 3u, 7u, 64u, 1000u}) {
      for (uint32_t grain : {0u, 1u, 3u, 64u, 5000u}) {
        std::vector<int> seen(count, 0);  // pieces do not overlap: no atomics needed
        std::atomic<uint32_t> small{0};
        pool.parallel_for(count, grain, [&](uint32_t begin, uint32_t end, uint32_t thread) {
          CHECK(begin < end && end <= count && thread < threads);
          if (end - begin < grain) ++small;
          for (uint32_t i = begin; i < end; ++i) ++seen[i];
        });
        for (uint32_t i = 0; i < count; ++i) CHECK_EQ(seen[i], 1);
        CHECK(small == 0 || count < grain);
      }
    }
  }
}

TEST("many short jobs, with pauses in which the workers fall asleep") {
  ThreadPool pool(3);
  uint64_t total = 0;
  for (int job = 0; job < 3000; ++job) {
    std::vector<uint32_t> out(16);
    pool.parallel_for(16, 1, [&](uint32_t begin, uint32_t end, uint32_t) {
      for (uint32_t i = begin; i < end; ++i) out[i] = i + job;
    });
    total += std::accumulate(out.begin(), out.end(), uint64_t{0}) - 16 * uint64_t(job);
    if (job % 500 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  CHECK_EQ(total, uint64_t{3000} * 120);
}

TEST("other threads take part") {
  ThreadPool pool(2);
  bool helped = false;
  for (int attempt = 0; attempt < 200 && !helped; ++attempt) {
    std::atomic<uint32_t> threads{0};
    pool.parallel_for(2, 1, [&](uint32_t, uint32_t, uint32_t thread) {
      threads |= 1u << thread;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    });
    helped = threads == 3;
  }
  CHECK(helped);
}

TEST("the first exception reaches the caller, and the pool goes on working") {
  for (uint32_t threads : {1u, 2u, 4u}) {
    ThreadPool pool(threads);
    for (int job = 0; job < 50; ++job) {
      CHECK_THROWS(std::runtime_error, "item", pool.parallel_for(100, 1, [&](uint32_t begin, uint32_t, uint32_t) {
        if (begin > 20) throw std::runtime_error("item failed");
      }));
      std::atomic<uint32_t> sum{0};
      pool.parallel_for(100, 1, [&](uint32_t begin, uint32_t end, uint32_t) { sum += end - begin; });
      CHECK_EQ(sum.load(), 100u);
    }
  }
}

TEST("hostile sizes are refused") {
  CHECK_THROWS(Error, "0 threads", ThreadPool(0));
  CHECK_THROWS(Error, "threads", ThreadPool(1u << 20));
}
