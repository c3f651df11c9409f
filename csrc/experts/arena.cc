#include "experts/arena.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>

#include "experts/expert_source.h"
#include "support/error.h"
#include "support/pages.h"

namespace headrace {

namespace {

uint64_t product_or_most(uint64_t a, uint64_t b) {
  uint64_t bytes = 0;
  return __builtin_mul_overflow(a, b, &bytes) ? UINT64_MAX : bytes;
}

}  // namespace

Arena::Arena(uint32_t num_slots, uint64_t stride_bytes)
    : reservation_(product_or_most(num_slots, stride_bytes)), stride_bytes_(stride_bytes), committed_(num_slots, 0) {
  if (reservation_.data() == nullptr) {
    throw Error("expert arena: cannot reserve address space for " + std::to_string(num_slots) + " slots of " +
                std::to_string(stride_bytes) + " bytes: " + std::strerror(errno));
  }
  if (sysconf(_SC_PAGESIZE) != static_cast<long>(kPage)) {
    throw Error("expert arena: expected memory pages of 4096 bytes, found " + std::to_string(sysconf(_SC_PAGESIZE)));
  }
}

void Arena::grow(uint32_t slot, uint64_t bytes) {
  const uint64_t have = committed_[slot];
  if (bytes <= have) return;
  uint8_t* begin = this->slot(slot) + have;
  const uint64_t more = bytes - have;
  prefer_huge_pages(begin, more);
  if (const int error = commit_pages(begin, more)) {
    give_back_pages(begin, more);  // some of them may have come
    throw Error("expert arena: the system refused " + std::to_string(more) + " bytes with " +
                std::to_string(total_committed_bytes_) + " committed: " + std::strerror(error) +
                "; use a smaller budget");
  }
  committed_[slot] = bytes;
  total_committed_bytes_ += more;
  uint8_t* const base = reservation_.data();
  // Huge pages that this completed together with what lies before or after.
  const uint64_t first = static_cast<uint64_t>(begin - base) / kHugePage * kHugePage;
  const uint64_t last = static_cast<uint64_t>(begin + more - 1 - base) / kHugePage * kHugePage;
  for (const uint64_t at : {first, last}) {
    const bool was_asked_for = base + at >= begin && at + kHugePage <= static_cast<uint64_t>(begin + more - base);
    if (!was_asked_for && is_committed(at, at + kHugePage)) merge_into_huge_page(base + at);
    if (first == last) break;
  }
}

bool Arena::is_committed(uint64_t begin, uint64_t end) const {
  if (end > committed_.size() * stride_bytes_) return false;
  for (uint64_t slot = begin / stride_bytes_; slot * stride_bytes_ < end; ++slot)
    if (committed_[slot] < std::min(end - slot * stride_bytes_, stride_bytes_)) return false;
  return true;
}

void Arena::trim(uint32_t slot, uint64_t bytes) {
  const uint64_t have = committed_[slot];
  if (bytes >= have) return;
  give_back_pages(this->slot(slot) + bytes, have - bytes);
  committed_[slot] = bytes;
  total_committed_bytes_ -= have - bytes;
}

}  // namespace headrace
