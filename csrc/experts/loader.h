// The threads that bring experts from files into slots. Knows nothing of passes, budgets or victims.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "experts/expert_source.h"
#include "experts/source_files.h"

namespace headrace {

// What is read at once: a stretch of a packed record, or whole tiles of one part's rows.
struct Piece {
  uint32_t part = 0;       // rows only
  uint32_t row_begin = 0;  // rows only
  uint32_t num_rows = 0;   // rows only
  uint64_t offset = 0;     // from the start of the record or of the part's extent
  uint64_t nbytes = 0;
};
constexpr uint64_t kPieceBytes = 1 << 20;  // at most, unless 16 rows are more
// How one expert of the layer is cut, in file order.
std::vector<Piece> cut_record(const LayerExperts& layer);
// Bytes that reading all of an expert returns: its pieces' blocks, as far as the files go. file_bytes: their sizes.
uint64_t read_bytes(const LayerExperts& layer, uint32_t expert, const std::vector<uint64_t>& file_bytes);
// Bytes of the buffer that each loader thread needs for rows; 0 if all layers are packed.
uint64_t staging_bytes(const ExpertSource& source);

class Loader {
 public:
  enum class Outcome { kWhole, kFailed, kDropped };
  struct Report {
    uint32_t slot = 0;
    Outcome outcome = Outcome::kWhole;
    uint64_t bytes_read = 0;
    std::string error;  // kFailed only
  };

  // source and files outlive the loader. `landed` is called once for each load that drop() does not return, by a loader
  // thread that holds no lock.
  Loader(const ExpertSource& source, SourceFiles& files, uint32_t num_threads,
         std::function<void(const Report&)> landed);
  ~Loader();  // waits for reads in flight; forgets the rest

  // Queues a load of a whole record into dst, a slot's first byte.
  void submit(uint32_t layer, uint32_t expert, uint32_t slot, uint8_t* dst);
  // Drops all loads. Returns a kDropped report for each that has no read in flight; the others are reported through
  // `landed` when theirs are done, as kDropped or, if no piece was missing, as usual.
  std::vector<Report> drop();

 private:
  struct Load {
    uint32_t layer = 0, expert = 0, slot = 0;
    uint8_t* dst = nullptr;
    uint32_t next = 0;       // piece to hand out
    uint32_t in_flight = 0;  // pieces handed out and not done
    bool stop = false;       // hand out no more
    uint64_t bytes_read = 0;
    std::string error;
    // Packed records: CRC-32C over the pieces in order, by one thread at a time.
    std::vector<bool> arrived;
    uint32_t checked = 0;
    bool checking = false;
    uint32_t crc = 0;
  };

  void run(uint8_t* staging);
  void stop_and_join();
  void read_piece(const Load& load, const Piece& piece, uint8_t* staging, uint64_t* bytes_read);
  void check_arrived(Load& load, std::unique_lock<std::mutex>& lock);
  std::string where(const Load& load) const;

  const ExpertSource& source_;
  SourceFiles& files_;
  const std::function<void(const Report&)> landed_;
  std::vector<std::vector<Piece>> pieces_;  // [layer]
  struct Free {
    void operator()(uint8_t* p) const;
  };
  std::vector<std::unique_ptr<uint8_t, Free>> staging_;  // [thread]

  std::mutex mutex_;
  std::condition_variable work_;
  std::list<std::shared_ptr<Load>> queue_;  // loads with pieces to hand out, oldest first
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace headrace
