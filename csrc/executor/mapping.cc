#include "executor/mapping.h"

#include <algorithm>
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

Mapping::Mapping(uint64_t bytes) : size_bytes_(round_up(bytes, kPage)), reservation_(size_bytes_) {
  if (size_bytes_ > 0 && data() == nullptr) fail("cannot reserve", size_bytes_, errno);
}

void Mapping::commit(uint64_t bytes) {
  bytes = std::min(round_up(bytes, kPage), size_bytes_);
  if (bytes > committed_bytes_) {
    uint8_t* const begin = data() + committed_bytes_;
    const uint64_t more = bytes - committed_bytes_;
    prefer_huge_pages(begin, more);
    if (const int error = commit_pages(begin, more)) {
      give_back_pages(begin, more);  // some of them may have come
      fail("cannot commit", bytes, error);
    }
  } else if (bytes < committed_bytes_) {
    give_back_pages(data() + bytes, committed_bytes_ - bytes);
  }
  committed_bytes_ = bytes;
}

}  // namespace headrace
