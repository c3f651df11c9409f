// What an arena says it has committed is what the system holds for it, page by page, whatever huge pages do.
#include "experts/arena.h"

#include <sys/mman.h>

#include <algorithm>
#include <random>
#include <vector>

#include "check.h"
#include "support/pages.h"

using namespace headrace;

namespace {

constexpr uint64_t kSmallPage = 4096;

// Pages of each slot that are in memory: a prefix, as committed_bytes() has it.
bool holds_what_it_says(const Arena& arena) {
  uint64_t total = 0;
  std::vector<unsigned char> present(arena.stride_bytes() / kSmallPage);
  for (uint32_t s = 0; s < arena.num_slots(); ++s) {
    if (mincore(arena.slot(s), arena.stride_bytes(), present.data()) != 0) return false;
    const uint64_t pages = arena.committed_bytes(s) / kSmallPage;
    for (uint64_t i = 0; i < present.size(); ++i) {
      if ((present[i] & 1) == (i < pages)) continue;
      std::fprintf(stderr, "slot %u page %llu of %llu committed is %d\n", s, static_cast<unsigned long long>(i),
                   static_cast<unsigned long long>(pages), present[i] & 1);
      return false;
    }
    total += arena.committed_bytes(s);
  }
  return total == arena.committed_bytes();
}

}  // namespace

TEST("an arena holds what it says, through growing and trimming in any order") {
  std::mt19937 random(5);
  for (uint64_t stride : {kSmallPage, 3 * kSmallPage, 1300 * kSmallPage, kHugePage, 515 * kSmallPage, 3 * kHugePage}) {
    const uint32_t num_slots = static_cast<uint32_t>(std::min<uint64_t>(900, 24 * kHugePage / stride));
    Arena arena(num_slots, stride);
    const uint64_t pages = stride / kSmallPage;
    std::vector<uint64_t> mark(num_slots, 0);
    for (uint32_t s = 0; s < num_slots; ++s) arena.grow(s, stride);  // as at the start: all, in order
    CHECK(holds_what_it_says(arena));
    for (int round = 0; round < 60; ++round) {
      for (int i = 0; i < 8; ++i) {
        const uint32_t s = random() % num_slots;
        // Whole slots, none, and cuts near the borders of huge pages and anywhere.
        const uint64_t to = random() % 4 == 0 ? stride : random() % 4 == 0 ? 0 : random() % (pages + 1) * kSmallPage;
        if (to < arena.committed_bytes(s)) {
          arena.trim(s, to);
        } else {
          arena.grow(s, to);
        }
        mark[s] = arena.committed_bytes(s) == 0 ? 0 : 1 + random();
        if (mark[s] != 0) std::memcpy(arena.slot(s), &mark[s], sizeof mark[s]);
      }
      CHECK(holds_what_it_says(arena));
      for (uint32_t s = 0; s < num_slots; ++s)
        if (mark[s] != 0) CHECK(std::memcmp(arena.slot(s), &mark[s], sizeof mark[s]) == 0);
    }
  }
}
