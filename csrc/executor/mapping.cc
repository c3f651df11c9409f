#include "executor/mapping.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "experts/expert_source.h"
#include "support/error.h"
#include "support/pages.h"

namespace headrace {

namespace {

[[noreturn]] void fail(const char* what, uint64_t bytes, int error) {
  throw Error(std::string(what) + " " + std::to_string(bytes) + " bytes of memory: " + std::strerror(error) +
              "; lower the context or the budget");
}

}  // namespace

Mapping::Mapping(uint64_t bytes) : size_bytes_(round_up(bytes, kPage)), reserved_bytes_(size_bytes_ + kHugePage) {
  if (size_bytes_ == 0) return;
  void* p = mmap(nullptr, reserved_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) fail("cannot reserve", size_bytes_, errno);
  reserved_ = static_cast<uint8_t*>(p);
  data_ = reserved_ + (kHugePage - reinterpret_cast<uint64_t>(reserved_) % kHugePage) % kHugePage;
  madvise(reserved_, reserved_bytes_, MADV_NOHUGEPAGE);
  prefer_huge_pages(data_, size_bytes_);
}

Mapping::~Mapping() {
  if (reserved_ != nullptr) munmap(reserved_, reserved_bytes_);
}

void Mapping::commit() {
  if (const int error = commit_pages(data_, size_bytes_)) fail("cannot commit", size_bytes_, error);
}

}  // namespace headrace
