// Which experts are in the fast tier, and what a pass does to that: hits, loads in their order, evictions. Pure, as
// its Policy is: it decides, and a driver carries it out. ExpertMemory drives it with real loads, Simulator with none.
// Every decision follows from the calls made and their order; docs/policies.md has the rules.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "experts/banks.h"
#include "experts/policy.h"
#include "experts/victims.h"

namespace headrace {

// How the experts of a prompt's pass are read (docs/prefill.md).
struct StreamOptions {
  uint32_t group_size = 1;   // G: experts of a read
  uint32_t queue_depth = 1;  // Q: reads in flight
  uint32_t banks = 1;        // B: groups that are read and not yet used up
  bool reads_early = true;   // before the routes of their layer are known
};

class Residency {
 public:
  static constexpr uint32_t kNone = UINT32_MAX;
  enum class State : uint8_t { kAbsent, kLoading, kResident };
  enum class Status : uint8_t { kQueued, kLoading, kReady, kTaken, kReleased, kFailed };

  // Per (pass, layer, distinct expert); summed since construction. DESIGN.md, "Words".
  struct Counters {
    uint64_t hits = 0;
    uint64_t late_hits = 0;
    uint64_t loads = 0;
    uint64_t prefetches = 0;
    uint64_t evictions = 0;
  };
  struct Entry {  // one distinct expert of the layer in progress
    uint32_t expert = 0;
    Status status = Status::kQueued;
    bool was_late = false;  // counted as a late hit
  };
  // was_taken: since it was loaded. The driver frees the expert's slot; its bytes were unused if it was never taken.
  using Evict = std::function<void(uint32_t expert, bool was_taken)>;

  // capacity_bytes: at least the largest record. Every eviction is reported through `evict` when it is decided.
  Residency(std::vector<LayerShape> layers, uint64_t capacity_bytes, const PolicyOptions& policy, Evict evict);

  // ---- one layer of a pass
  // ids: the layer's distinct experts, ascending. num_routes: of each; empty: one. The policy learns of them once a
  // pass.
  void observe(uint32_t layer, std::span<const uint32_t> ids);
  // Pins the layer's experts that are resident or on their way, queues the others in storage order.
  void begin(uint32_t layer, std::span<const uint32_t> ids, std::span<const uint32_t> num_routes);
  // The entry whose load starts now, its room made, or kNone while nothing may start.
  uint32_t next_load();
  void take(uint32_t index);
  void release(uint32_t index);
  // For a driver that keeps what it took: makes room for one more load by giving up experts of the layer that it does
  // not hold, those released first, then the furthest hit. False if there is none.
  bool make_room_in_layer();
  // No more loads start. Ends the layer: nothing of it may be loading then.
  void drop_queue() { queue_.clear(); }
  void end();

  // ---- loads and prefetches on their way
  void landed(uint32_t expert);
  void failed(uint32_t expert);  // or dropped
  // Whether a prefetch of the expert may start now; if so it counts, and room has been made for it. Experts for which
  // is_protected says so are not evicted for it, nor others that were prefetched and whose layer has not come since.
  bool prefetch(uint32_t expert, const std::function<bool(uint32_t)>& is_protected);

  // ---- a prompt's pass, streamed. Between passes; nothing is on its way then
  // may_read_early: [layer]. is_first: of its prompt.
  void begin_stream(const StreamOptions& options, std::vector<bool> may_read_early, bool is_first);
  void end_stream();
  // The experts of one group whose read starts now, their room made; empty while none may start.
  void next_group(std::vector<uint32_t>& experts);
  // A read of next_group() is over: each of its experts was landed() or failed().
  void end_group() { --num_groups_in_flight_; }
  // Experts on their way for which begin() found no route. The driver drops them: failed().
  const std::vector<uint32_t>& unwanted() const { return unwanted_; }
  bool is_unwanted(uint32_t expert) const { return experts_[expert].is_unwanted; }
  bool is_streaming() const { return streaming_; }
  uint32_t num_layers_begun() const { return num_layers_begun_; }  // of the pass that is streamed: all below
  // Whether they share a bank; always true where no pass is streamed.
  bool is_same_group(uint32_t a, uint32_t b) const { return !streaming_ || banks_.group(a) == banks_.group(b); }

  // Routes of later passes, for policies with an oracle: one layer's, ascending.
  void expect(uint32_t layer, std::span<const uint32_t> ids);
  // Between passes, with nothing on its way: evicts until what is resident fits.
  void resize(uint64_t capacity_bytes);

  bool is_active() const { return active_; }
  uint32_t layer() const { return layer_; }
  const std::vector<Entry>& entries() const { return entries_; }
  uint32_t num_loading() const { return num_loading_; }  // of the layer in progress
  State state(uint32_t expert) const { return experts_[expert].state; }
  // Its index in the layer in progress, or kNone.
  uint32_t entry_of(uint32_t expert) const { return experts_[expert].entry; }
  uint32_t layer_of(uint32_t expert) const { return experts_[expert].layer; }
  uint32_t first_expert(uint32_t layer) const { return first_expert_[layer]; }
  uint32_t num_experts() const { return static_cast<uint32_t>(experts_.size()); }
  uint64_t capacity_bytes() const { return capacity_bytes_; }
  uint64_t used_bytes() const { return used_bytes_; }  // records of all experts that are not absent
  const Counters& counters() const { return counters_; }
  static uint64_t overhead_bytes(const std::vector<LayerShape>& layers, const PolicyOptions& policy);

 private:
  struct Expert {
    State state = State::kAbsent;
    bool was_taken = false;    // since it was loaded
    bool is_expected = false;  // prefetched, and its layer has not come since
    bool is_unwanted = false;  // on its way, and its layer has come without a route to it
    uint32_t entry = kNone;    // of the layer in progress
    uint32_t layer = 0;
  };

  uint64_t record_bytes(uint32_t expert) const { return layers_[experts_[expert].layer].record_bytes; }
  void admit(uint32_t expert);
  void evict(uint32_t expert);
  void make_evictable(uint32_t expert);
  void unlist(uint32_t expert);
  void rank(uint32_t expert);
  void pin(uint32_t expert, uint32_t index);
  bool fits(uint64_t record) const { return used_bytes_ + record <= capacity_bytes_; }
  enum class Choice : uint8_t { kGoes, kStays, kEnds };  // kEnds: no later victim may go either
  template <class Choose>
  bool make_room(uint64_t bytes, Choose choose);
  bool give_up_furthest_hit();
  bool give_up_furthest_guess();
  void rekey();
  void start(uint32_t index);
  void settle_unrouted(uint32_t layer);
  void next_routed_group(std::vector<uint32_t>& experts);
  void next_early_group(std::vector<uint32_t>& experts);
  bool is_waited_for(uint32_t index) const;

  const std::vector<LayerShape> layers_;
  std::vector<uint32_t> first_expert_;  // [layer]
  uint64_t largest_record_bytes_ = 0;
  uint64_t capacity_bytes_;
  std::unique_ptr<Policy> policy_;
  const Evict evict_;
  std::vector<Expert> experts_;
  Victims victims_;  // resident, and not of the layer in progress
  uint64_t used_bytes_ = 0;
  uint64_t evictable_bytes_ = 0;  // of victims_
  uint64_t prefetch_bytes_ = 0;   // on their way, not of the layer in progress
  Counters counters_;

  bool active_ = false;
  uint32_t layer_ = 0;
  std::vector<Entry> entries_;   // as ids
  std::vector<uint32_t> queue_;  // entries that wait for room, descending: the next one is at the back
  uint32_t num_loading_ = 0;
  uint32_t num_passing_ = 0;      // the first so many entries give their slots to later ones
  std::vector<uint32_t> passed_;  // released ones of them that hold a slot, a heap: the lowest first
  std::vector<uint32_t> landed_;  // prefetches that landed during the layer

  bool streaming_ = false;
  StreamOptions stream_;
  std::vector<bool> may_read_early_;     // [layer]
  Banks banks_;                          // of the pass that is streamed
  std::vector<uint64_t> prompt_routes_;  // [expert]: of the prompt that is streamed
  std::vector<uint32_t> unwanted_;       // of the layer in progress
  uint32_t num_groups_in_flight_ = 0;
  uint32_t num_layers_begun_ = 0;            // of the pass: all below
  uint32_t early_layer_ = 0, early_id_ = 0;  // the expert before which all that may be read early were looked at

  std::vector<uint32_t> changed_, scratch_;
};

}  // namespace headrace
