#include <algorithm>
#include <list>
#include <random>

#include "check.h"
#include "experts/lru.h"

using headrace::Lru;

TEST("the victim is the least recently used item that may go") {
  Lru lru(4);
  const auto any = [](uint32_t) { return true; };
  CHECK_EQ(lru.victim(any), Lru::kNone);
  for (uint32_t item : {2u, 0u, 3u}) lru.use(item);
  CHECK_EQ(lru.victim(any), 2u);
  CHECK_EQ(lru.victim([](uint32_t item) { return item != 2; }), 0u);
  CHECK_EQ(lru.victim([](uint32_t) { return false; }), Lru::kNone);
  lru.use(2);
  CHECK_EQ(lru.victim(any), 0u);
  lru.remove(0);
  lru.remove(0);
  lru.remove(1);
  CHECK_EQ(lru.victim(any), 3u);
  lru.remove(3);
  lru.remove(2);
  CHECK_EQ(lru.victim(any), Lru::kNone);
}

TEST("random uses and removals agree with a list") {
  std::mt19937 random(5);
  constexpr uint32_t kItems = 23;
  Lru lru(kItems);
  std::list<uint32_t> model;  // oldest first
  for (int step = 0; step < 20000; ++step) {
    const uint32_t item = random() % kItems;
    model.remove(item);
    if (random() % 3) {
      lru.use(item);
      model.push_back(item);
    } else {
      lru.remove(item);
    }
    const uint32_t divisor = 1 + random() % 3;
    const auto evictable = [&](uint32_t i) { return i % divisor == 0; };
    const auto expected = std::find_if(model.begin(), model.end(), evictable);
    CHECK_EQ(lru.victim(evictable), expected == model.end() ? Lru::kNone : *expected);
  }
}
