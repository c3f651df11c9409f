// Pages behind anonymous memory. Reading weights through 4 KiB pages costs a quarter of the memory's bandwidth on some
// machines, so whole 2 MiB pages are asked for wherever all of one is committed: never for memory that nobody asked
// for.
#pragma once

#include <cstdint>

namespace headrace {

constexpr uint64_t kHugePage = uint64_t{2} << 20;

// Address space for anonymous memory, zeroed when touched, in small pages until huge ones are asked for.
class Reservation {
 public:
  // data() is null if the system refuses (errno says why) or n is 0.
  explicit Reservation(uint64_t n);
  ~Reservation();
  Reservation(const Reservation&) = delete;
  Reservation& operator=(const Reservation&) = delete;

  uint8_t* data() const { return data_; }  // n bytes from the start of a huge page on

 private:
  uint8_t* reserved_ = nullptr;
  uint64_t reserved_bytes_ = 0;
  uint8_t* data_ = nullptr;
};

// Asks for huge pages, where they lie whole inside [p, p + n), when the memory is next touched. A hint.
void prefer_huge_pages(uint8_t* p, uint64_t n);
// Gives the pages of [p, p + n) back, and asks for small ones for every huge page that overlaps the range: nothing of
// it may return when its neighbours are touched.
void give_back_pages(uint8_t* p, uint64_t n);
// Turns the committed huge page at p (aligned) into one, if the system can (Linux 6.1). A hint.
void merge_into_huge_page(uint8_t* p);
// Faults in the pages of [p, p + n). Returns 0 or an errno; some pages may have come.
int commit_pages(uint8_t* p, uint64_t n);

}  // namespace headrace
