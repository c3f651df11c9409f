// A priority queue over experts whose keys may change: who may be evicted, and who of them goes first.
#pragma once

#include <cstdint>
#include <tuple>
#include <utility>
#include <vector>

#include "experts/policy.h"

namespace headrace {

class Victims {
 public:
  explicit Victims(uint32_t num_experts) : keys_(num_experts), place_(num_experts, kAbsent) {}

  bool empty() const { return heap_.empty(); }
  bool contains(uint32_t expert) const { return place_[expert] != kAbsent; }
  // The one that goes first; not empty.
  uint32_t first() const { return heap_.front(); }

  // Inserts the expert, or moves it to where its new key belongs. Spared ones go after all others.
  void put(uint32_t expert, Policy::Key key, bool is_spared) {
    keys_[expert] = {is_spared, key};
    if (!contains(expert)) {
      place_[expert] = static_cast<uint32_t>(heap_.size());
      heap_.push_back(expert);
    }
    settle(place_[expert]);
  }

  void remove(uint32_t expert) {
    const uint32_t at = place_[expert];
    if (at == kAbsent) return;
    place_[expert] = kAbsent;
    const uint32_t last = heap_.back();
    heap_.pop_back();
    if (last == expert) return;
    heap_[at] = last;
    place_[last] = at;
    settle(at);
  }

  bool is_spared(uint32_t expert) const { return keys_[expert].is_spared; }

 private:
  static constexpr uint32_t kAbsent = UINT32_MAX;
  struct Rank {
    bool is_spared = false;
    Policy::Key key;
  };

  bool before(uint32_t a, uint32_t b) const {
    const Rank &x = keys_[a], &y = keys_[b];
    return std::tie(x.is_spared, x.key.first, x.key.second, a) < std::tie(y.is_spared, y.key.first, y.key.second, b);
  }

  void swap(uint32_t i, uint32_t j) {
    std::swap(heap_[i], heap_[j]);
    place_[heap_[i]] = i;
    place_[heap_[j]] = j;
  }

  void settle(uint32_t at) {
    for (; at > 0 && before(heap_[at], heap_[(at - 1) / 2]); at = (at - 1) / 2) swap(at, (at - 1) / 2);
    for (;;) {
      uint32_t least = at;
      for (uint32_t child = 2 * at + 1; child <= 2 * at + 2 && child < heap_.size(); ++child) {
        if (before(heap_[child], heap_[least])) least = child;
      }
      if (least == at) return;
      swap(at, least);
      at = least;
    }
  }

  std::vector<Rank> keys_;       // [expert]
  std::vector<uint32_t> place_;  // [expert], in heap_
  std::vector<uint32_t> heap_;
};

}  // namespace headrace
