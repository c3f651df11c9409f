// What this machine can do at best, measured beside the kernels in the same run.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <ctime>
#include <thread>
#include <vector>

namespace headrace {

inline double thread_cpu_s() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

// Mean processor seconds of `threads` calls of work(i) at the same time: what else runs on the machine takes memory
// bandwidth from them, but its turns on the processor do not count.
template <class Work>
double timed(unsigned threads, Work work) {
  std::vector<double> seconds(threads);
  const auto call = [&](unsigned i) {
    const double start = thread_cpu_s();
    work(i);
    seconds[i] = thread_cpu_s() - start;
  };
  std::vector<std::thread> others;
  for (unsigned i = 1; i < threads; ++i) others.emplace_back(call, i);
  call(0);
  for (auto& t : others) t.join();
  double sum = 0;
  for (double s : seconds) sum += s;
  return sum / threads;
}

inline double median(std::vector<double> v) {
  std::nth_element(v.begin(), v.begin() + v.size() / 2, v.end());
  return v[v.size() / 2];
}

// By `threads` threads together: a read of the n bytes at p, each thread its share once; int8 products; float products.
double stream_bytes_per_s(unsigned threads, const uint8_t* p, size_t n);
double int8_macs_per_s(unsigned threads);
double float_macs_per_s(unsigned threads);

}  // namespace headrace
