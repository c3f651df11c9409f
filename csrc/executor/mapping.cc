#include "executor/mapping.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "experts/expert_source.h"
#include "support/error.h"

namespace headrace {

namespace {

[[noreturn]] void fail(const char* what, uint64_t bytes, int error) {
  throw Error(std::string(what) + " " + std::to_string(bytes) + " bytes of memory: " + std::strerror(error) +
              "; lower the context or the budget");
}

}  // namespace

Mapping::Mapping(uint64_t bytes) : size_bytes_(round_up(bytes, kPage)) {
  if (size_bytes_ == 0) return;
  void* p = mmap(nullptr, size_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) fail("cannot reserve", size_bytes_, errno);
  data_ = static_cast<uint8_t*>(p);
}

Mapping::~Mapping() {
  if (data_ != nullptr) munmap(data_, size_bytes_);
}

void Mapping::commit() {
  if (size_bytes_ == 0) return;
#ifdef MADV_POPULATE_WRITE
  if (madvise(data_, size_bytes_, MADV_POPULATE_WRITE) == 0) return;
  if (errno != EINVAL) fail("cannot commit", size_bytes_, errno);
#endif
  // Kernels before 5.14: a write to each page.
  for (uint64_t at = 0; at < size_bytes_; at += kPage) static_cast<volatile uint8_t*>(data_)[at] = 0;
}

}  // namespace headrace
