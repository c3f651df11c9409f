// Least recently used: which resident expert goes first. Pure: no locks, no clocks, so that the engine and the trace
// simulator run the same code (DESIGN.md, invariant 5).
#pragma once

#include <cstdint>
#include <vector>

namespace headrace {

// An order over items 0..num_items-1, of which any subset is present. "Use" means routed in a pass.
class Lru {
 public:
  static constexpr uint32_t kNone = UINT32_MAX;

  explicit Lru(uint32_t num_items) : next_(num_items, kNone), prev_(num_items, kNone), present_(num_items, false) {}

  // Makes `item` the most recently used one, adding it if it is not present.
  void use(uint32_t item) {
    remove(item);
    present_[item] = true;
    prev_[item] = newest_;
    next_[item] = kNone;
    (newest_ == kNone ? oldest_ : next_[newest_]) = item;
    newest_ = item;
  }

  void remove(uint32_t item) {
    if (!present_[item]) return;
    present_[item] = false;
    (prev_[item] == kNone ? oldest_ : next_[prev_[item]]) = next_[item];
    (next_[item] == kNone ? newest_ : prev_[next_[item]]) = prev_[item];
  }

  // The least recently used item that may be evicted, or kNone. Items of the layer in progress, the only ones that may
  // not be evicted, were used last, so the walk stops at once unless nothing else is left.
  template <class Evictable>
  uint32_t victim(Evictable evictable) const {
    for (uint32_t item = oldest_; item != kNone; item = next_[item]) {
      if (evictable(item)) return item;
    }
    return kNone;
  }

 private:
  std::vector<uint32_t> next_, prev_;
  std::vector<bool> present_;
  uint32_t oldest_ = kNone, newest_ = kNone;
};

}  // namespace headrace
