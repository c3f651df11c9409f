// Anonymous memory of the process: zeroed, in huge pages where they fit, given back as a whole.
#pragma once

#include <cstdint>

namespace headrace {

class Mapping {
 public:
  // Reserves `bytes`, rounded up to whole pages. Pages are committed when first written, or all at once by commit().
  // Error if the system refuses.
  explicit Mapping(uint64_t bytes);
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  // Faults every page in, so that the process's size is known now and not in the middle of a pass.
  void commit();
  uint8_t* data() const { return data_; }
  uint64_t size_bytes() const { return size_bytes_; }

 private:
  uint8_t* data_ = nullptr;  // the first whole huge page of what is reserved
  uint64_t size_bytes_;
  uint8_t* reserved_ = nullptr;
  uint64_t reserved_bytes_;
};

}  // namespace headrace
