#include "executor/mapping.h"

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
  prefer_huge_pages(data(), size_bytes_);
}

void Mapping::commit() {
  if (const int error = commit_pages(data(), size_bytes_)) fail("cannot commit", size_bytes_, error);
}

}  // namespace headrace
