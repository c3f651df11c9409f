#include "experts/arena.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "experts/expert_source.h"
#include "support/error.h"

namespace headrace {

Arena::Arena(uint32_t num_slots, uint64_t stride_bytes) : stride_bytes_(stride_bytes), committed_(num_slots, 0) {
  if (sysconf(_SC_PAGESIZE) != static_cast<long>(kPage)) {
    throw Error("expert arena: expected memory pages of 4096 bytes, found " + std::to_string(sysconf(_SC_PAGESIZE)));
  }
  uint64_t bytes = 0;
  void* base = MAP_FAILED;
  if (__builtin_mul_overflow(num_slots, stride_bytes, &bytes)) {
    errno = ENOMEM;
  } else {
    base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  }
  if (base == MAP_FAILED) {
    throw Error("expert arena: cannot reserve address space for " + std::to_string(num_slots) + " slots of " +
                std::to_string(stride_bytes) + " bytes: " + std::strerror(errno));
  }
  base_ = static_cast<uint8_t*>(base);
  // A huge page would commit memory that no slot asked for.
  madvise(base_, bytes, MADV_NOHUGEPAGE);
}

Arena::~Arena() { munmap(base_, committed_.size() * stride_bytes_); }

void Arena::grow(uint32_t slot, uint64_t bytes) {
  const uint64_t have = committed_[slot];
  if (bytes <= have) return;
  uint8_t* begin = this->slot(slot) + have;
  const uint64_t more = bytes - have;
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
  int rc = 0;
  do {
    rc = madvise(begin, more, MADV_POPULATE_WRITE);
  } while (rc != 0 && (errno == EAGAIN || errno == EINTR));
  if (rc != 0 && errno == EINVAL) {  // before Linux 5.14
    for (uint64_t i = 0; i < more; i += kPage) *static_cast<volatile uint8_t*>(begin + i) = 0;
    rc = 0;
  }
  if (rc != 0) {
    const int error = errno;
    madvise(begin, more, MADV_DONTNEED);  // some of the pages may have come
    throw Error("expert arena: the system refused " + std::to_string(more) + " bytes with " +
                std::to_string(total_committed_bytes_) + " committed: " + std::strerror(error) +
                "; use a smaller budget");
  }
  committed_[slot] = bytes;
  total_committed_bytes_ += more;
}

void Arena::trim(uint32_t slot, uint64_t bytes) {
  const uint64_t have = committed_[slot];
  if (bytes >= have) return;
  madvise(this->slot(slot) + bytes, have - bytes, MADV_DONTNEED);
  committed_[slot] = bytes;
  total_committed_bytes_ -= have - bytes;
}

}  // namespace headrace
