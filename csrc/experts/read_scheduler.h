// Residency, and which read starts next: the layer's loads, then a streamed pass's groups, then guesses. Pure: it is
// told what happens, in order, and says what to read; ExpertMemory reads, Simulator does not. What it was told beside
// the routes can be kept and told again (ReadEventLog), with the same outcome.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <vector>

#include "experts/prefetcher.h"
#include "experts/read_events.h"
#include "experts/residency.h"

namespace headrace {

class ReadScheduler {
 public:
  struct Read {
    std::vector<uint32_t> experts;  // of one layer, ascending
    bool is_group = false;          // of a streamed pass
    bool is_guess = false;
  };
  // Prefetches on their way at a time: one that is nearly over, and one to go on with.
  static constexpr uint32_t kPrefetches = 2;

  // max_prefetches: on their way at a time.
  ReadScheduler(std::vector<LayerShape> layers, uint64_t capacity_bytes, const PolicyOptions& policy,
                Residency::Evict evict, uint32_t max_prefetches = kPrefetches);

  // ---- what happens
  void begin_stream(const StreamOptions& options, const std::vector<bool>& may_read_early, bool is_first);
  void end_stream();
  void observe(uint32_t layer, std::span<const uint32_t> ids) { residency_.observe(layer, ids); }
  void begin(uint32_t layer, std::span<const uint32_t> ids, std::span<const uint32_t> num_routes);
  void take(uint32_t index) { residency_.take(index); }
  void release(uint32_t index);
  void end();
  // The read that begins with this expert is over. `gone` is filled with those of its experts that have no slot now:
  // all of them if it failed or was dropped, else those that were unwanted. bytes_read: of each expert.
  void landed(uint32_t first_expert, std::span<const uint32_t> bytes_read, std::vector<uint32_t>& gone);
  void failed(uint32_t first_expert, std::span<const uint32_t> bytes_read, std::vector<uint32_t>& gone);
  void forecast(uint32_t layer, std::vector<uint32_t> experts);
  void resize(uint64_t capacity_bytes);
  // No read starts while held.
  void hold(bool is_held);
  // For a driver that keeps what it took; see Residency.
  bool make_room_in_layer() { return residency_.make_room_in_layer(); }
  void drop_queue() { residency_.drop_queue(); }
  void expect(uint32_t layer, std::span<const uint32_t> ids) { residency_.expect(layer, ids); }

  // ---- what to do: after each of the above but forecast(), until it says false. may_guess: prefetches too
  bool next(Read& read, bool may_guess = true);

  // The read under way that begins with this expert, or null.
  const Read* in_flight(uint32_t first_expert) const {
    const auto at = in_flight_.find(first_expert);
    return at == in_flight_.end() ? nullptr : &at->second;
  }
  uint32_t num_in_flight() const { return static_cast<uint32_t>(in_flight_.size()); }
  const Residency& residency() const { return residency_; }
  ReadEventLog& log() { return log_; }

 private:
  Read finish(uint32_t first_expert);

  const std::vector<LayerShape> layers_;
  const uint32_t max_prefetches_;
  Residency residency_;
  Prefetcher prefetcher_;
  uint32_t last_layer_ = 0;             // begun
  std::map<uint32_t, Read> in_flight_;  // by its first expert
  uint32_t num_prefetches_ = 0;
  bool is_held_ = false;
  ReadEventLog log_;
};

}  // namespace headrace
