#include "support/pages.h"

#include <sys/mman.h>

#include <cerrno>

namespace headrace {

namespace {

// Older headers lack these; a kernel that does not know one says EINVAL.
constexpr int kPopulateWrite = 23;  // Linux 5.14
constexpr int kCollapse = 25;       // Linux 6.1
constexpr uint64_t kSmallPage = 4096;

uint64_t down(uint64_t address) { return address / kHugePage * kHugePage; }
uint64_t up(uint64_t address) { return down(address + kHugePage - 1); }

void advise(uint64_t begin, uint64_t end, int advice) {
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, advice);
}

}  // namespace

Reservation::Reservation(uint64_t n) {
  if (n == 0) return;
  if (__builtin_add_overflow(n, kHugePage, &reserved_bytes_)) {
    errno = ENOMEM;
    return;
  }
  void* p = mmap(nullptr, reserved_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) return;
  madvise(p, reserved_bytes_, MADV_NOHUGEPAGE);
  reserved_ = static_cast<uint8_t*>(p);
  data_ = reinterpret_cast<uint8_t*>(up(reinterpret_cast<uint64_t>(p)));
}

Reservation::~Reservation() {
  if (reserved_ != nullptr) munmap(reserved_, reserved_bytes_);
}

void prefer_huge_pages(uint8_t* p, uint64_t n) {
  const uint64_t begin = reinterpret_cast<uint64_t>(p);
  advise(up(begin), down(begin + n), MADV_HUGEPAGE);
}

void give_back_pages(uint8_t* p, uint64_t n) {
  if (n == 0) return;
  const uint64_t begin = reinterpret_cast<uint64_t>(p);
  advise(down(begin), up(begin + n), MADV_NOHUGEPAGE);
  advise(begin, begin + n, MADV_DONTNEED);
}

void merge_into_huge_page(uint8_t* p) {
  madvise(p, kHugePage, MADV_HUGEPAGE);  // its neighbours have it: one mapping for the kernel instead of many
  madvise(p, kHugePage, kCollapse);
}

int commit_pages(uint8_t* p, uint64_t n) {
  int rc = 0;
  do {
    rc = n == 0 ? 0 : madvise(p, n, kPopulateWrite);
  } while (rc != 0 && (errno == EAGAIN || errno == EINTR));
  if (rc == 0) return 0;
  if (errno != EINVAL) return errno;
  for (uint64_t i = 0; i < n; i += kSmallPage) {
    volatile uint8_t* page = p + i;
    *page = *page;
  }
  return 0;
}

}  // namespace headrace
