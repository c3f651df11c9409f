// The threads that bring experts from files into slots. Knows nothing of passes, budgets or victims.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
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
  // One expert of a read: its slot, what became of it, and what reading it cost.
  struct Item {
    uint32_t slot = 0;
    Outcome outcome = Outcome::kWhole;
    uint64_t bytes_read = 0;
  };
  struct Report {
    std::vector<Item> items;  // as submitted
    std::string error;        // if an item failed: then all that were not dropped did
  };
  struct Target {
    uint32_t expert = 0, slot = 0;
    uint8_t* dst = nullptr;  // the slot's first byte
  };
  struct Request {
    uint32_t layer = 0;
    std::vector<Target> targets;  // experts of one layer, ascending
    bool is_urgent = true;        // its pieces are handed out before those of reads that are not
    uint32_t max_threads = UINT32_MAX;
  };

  // source and files outlive the loader. `landed` is called once for each read that cancel() and drop() do not return,
  // by a loader thread that holds no lock.
  Loader(const ExpertSource& source, SourceFiles& files, uint32_t num_threads,
         std::function<void(const Report&)> landed);
  ~Loader();  // waits for pieces in flight; forgets the rest

  // Queues a read of whole records.
  void submit(Request request);
  // No further piece of the slot's expert is read; unless none was left, it is reported as kDropped with its read.
  // Returns that report if the read is over thereby.
  std::optional<Report> cancel(uint32_t slot);
  // The slot's read is urgent from now on.
  void promote(uint32_t slot);
  // Cancels every read that has one of these slots. Returns reports as cancel() does.
  std::vector<Report> drop(const std::function<bool(uint32_t slot)>& is_meant);

 private:
  struct Job : Target {
    bool dropped = false;
    uint64_t bytes_read = 0;
    // Packed records: CRC-32C over the pieces in order, by one thread at a time.
    std::vector<bool> arrived;
    uint32_t checked = 0;
    bool checking = false;
    uint32_t crc = 0;
  };
  struct Read {
    uint32_t layer = 0;
    std::vector<Job> targets;
    bool is_urgent = true;
    uint32_t max_threads = 0;
    uint32_t target = 0, piece = 0;  // to hand out
    uint32_t in_flight = 0;          // pieces handed out and not done
    std::string error;
  };
  using Reads = std::list<std::shared_ptr<Read>>;

  void run(uint8_t* staging);
  void stop_and_join();
  void read_piece(const Read& read, const Job& job, const Piece& piece, uint8_t* staging, uint64_t* bytes_read);
  void check_arrived(Read& read, Job& job, std::unique_lock<std::mutex>& lock);
  bool has_pieces(Read& read);
  std::shared_ptr<Read> next_read();
  Report report(const Read& read) const;
  std::string where(const Read& read, const Job& job) const;

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
  Reads reads_;  // those not over, oldest first
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace headrace
