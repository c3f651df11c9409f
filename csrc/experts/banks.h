// Which banks of a streamed pass are taken: a bank holds one group, G experts of a layer in storage order, from the
// start of its read until none of its experts is wanted any more (EStream, section 3.3).
#pragma once

#include <cstdint>
#include <vector>

#include "experts/policy.h"

namespace headrace {

class Banks {
 public:
  explicit Banks(const std::vector<LayerShape>& layers) {
    for (const LayerShape& layer : layers) {
      for (uint32_t id = 0; id < layer.num_experts; ++id) id_in_layer_.push_back(id);
    }
    held_.resize(id_in_layer_.size(), false);
    num_held_.resize(id_in_layer_.size(), 0);
  }

  // All banks are free.
  void reset(uint32_t group_size, uint32_t num_banks) {
    group_size_ = group_size;
    num_banks_ = num_banks;
    num_taken_ = 0;
    held_.assign(held_.size(), false);
    num_held_.assign(num_held_.size(), 0);
  }

  // The first expert of this one's group.
  uint32_t group(uint32_t expert) const { return expert - id_in_layer_[expert] % group_size_; }
  bool has_room_for(uint32_t expert) const { return num_taken_ < num_banks_ || num_held_[group(expert)] > 0; }
  bool holds(uint32_t expert) const { return held_[expert]; }

  void hold(uint32_t expert) {
    if (held_[expert]) return;
    held_[expert] = true;
    if (num_held_[group(expert)]++ == 0) ++num_taken_;
  }

  void let_go(uint32_t expert) {
    if (!held_[expert]) return;
    held_[expert] = false;
    if (--num_held_[group(expert)] == 0) --num_taken_;
  }

 private:
  uint32_t group_size_ = 1, num_banks_ = 0, num_taken_ = 0;
  std::vector<uint32_t> id_in_layer_;  // [expert]
  std::vector<bool> held_;             // [expert]
  std::vector<uint32_t> num_held_;     // [first expert of a group]
};

}  // namespace headrace
