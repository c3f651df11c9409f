// Address space for expert slots, and an exact account of the pages behind it. No locks: ExpertMemory holds its own.
#pragma once

#include <cstdint>
#include <vector>

#include "support/pages.h"

namespace headrace {

// Slots of `stride_bytes` in one anonymous mapping. What a slot has committed is a prefix of it, in whole pages.
class Arena {
 public:
  // stride_bytes: a multiple of 4 KiB. Reserves address space only. Error if the system refuses.
  Arena(uint32_t num_slots, uint64_t stride_bytes);

  uint8_t* slot(uint32_t i) const { return reservation_.data() + i * stride_bytes_; }
  uint32_t num_slots() const { return static_cast<uint32_t>(committed_.size()); }
  uint64_t stride_bytes() const { return stride_bytes_; }
  uint64_t committed_bytes(uint32_t slot) const { return committed_[slot]; }
  uint64_t committed_bytes() const { return total_committed_bytes_; }

  // Faults in pages until `bytes` of the slot are committed (a multiple of 4 KiB). Error if there is no memory.
  void grow(uint32_t slot, uint64_t bytes);
  // Gives back what the slot has committed beyond `bytes` (a multiple of 4 KiB).
  void trim(uint32_t slot, uint64_t bytes);

 private:
  bool is_committed(uint64_t begin, uint64_t end) const;  // offsets from slot 0

  Reservation reservation_;
  uint64_t stride_bytes_;
  uint64_t total_committed_bytes_ = 0;
  std::vector<uint64_t> committed_;
};

}  // namespace headrace
