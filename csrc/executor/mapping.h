// Anonymous memory of the process: zeroed, in huge pages where they fit, given back as a whole.
#pragma once

#include <cstdint>

#include "support/pages.h"

namespace headrace {

class Mapping {
 public:
  // Reserves `bytes`, rounded up to whole pages. Pages are committed when first written, or all at once by commit().
  // Error if the system refuses.
  explicit Mapping(uint64_t bytes);

  // Faults every page in, so that the process's size is known now and not in the middle of a pass.
  void commit();
  uint8_t* data() const { return reservation_.data(); }
  uint64_t size_bytes() const { return size_bytes_; }

 private:
  uint64_t size_bytes_;
  Reservation reservation_;
};

}  // namespace headrace
