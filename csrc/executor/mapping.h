// Anonymous memory of the process: zeroed, in huge pages where they fit into what is committed.
#pragma once

#include <cstdint>

#include "support/pages.h"

namespace headrace {

class Mapping {
 public:
  // Reserves `bytes`, rounded up to whole pages. Error if the system refuses.
  explicit Mapping(uint64_t bytes);

  // Commits the first `bytes`, rounded up to whole pages, and gives the rest back: faulted in now, so that the
  // process's size is known and does not change in the middle of a pass. What was committed and stays keeps its
  // contents. Error if the system refuses; then what was committed before still is.
  void commit(uint64_t bytes);
  void commit() { commit(size_bytes_); }
  uint64_t committed_bytes() const { return committed_bytes_; }
  uint8_t* data() const { return reservation_.data(); }
  uint64_t size_bytes() const { return size_bytes_; }

 private:
  uint64_t size_bytes_, committed_bytes_ = 0;
  Reservation reservation_;
};

}  // namespace headrace
