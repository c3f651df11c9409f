// The fast tier: a bounded arena of expert slots and the threads that load experts into it, as Residency decides.
//
// The executor names the distinct experts that a layer of this pass needs, and takes them as they become ready. Nothing
// above this interface knows how experts are stored or moved.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "experts/expert_source.h"
#include "experts/policy.h"
#include "experts/residency.h"

namespace headrace {

// Per (pass, layer, distinct expert); summed since construction. DESIGN.md, "Words".
struct ExpertCounters {
  uint64_t hits = 0;
  uint64_t late_hits = 0;
  uint64_t loads = 0;
  uint64_t prefetches = 0;
  uint64_t evictions = 0;   // experts, whatever made them go: loads, prefetches, resize()
  uint64_t bytes_read = 0;  // bytes that reads returned, padding and alignment windows included
  uint64_t bytes_unused =
      0;                    // of experts evicted before take() gave them out, and of loads that failed or were dropped
  uint64_t io_wait_ns = 0;  // time the executor waited for an expert
  uint64_t io_busy_ns = 0;  // time with a read under way
};

// When experts of streamed passes were read and used, in seconds since record_timeline(). A group may take several
// reads, where some of its experts were there.
struct Timeline {
  struct Read {
    uint32_t layer, first_expert, num_experts;  // first_expert: of the layer
    uint64_t bytes;
    double start_s, end_s;
  };
  struct Compute {
    uint32_t layer, first_expert, num_experts, num_routes;
    double start_s, end_s;  // from take() to the release of the last
  };
  struct Layer {
    uint32_t layer;
    double routed_s;  // begin() was called
  };
  std::vector<Read> reads;
  std::vector<Compute> computes;
  std::vector<Layer> layers;
};

struct ExpertMemoryOptions {
  uint64_t arena_bytes = 0;  // ceiling on committed slot bytes; at least the largest record
  uint32_t loader_threads = 2;
  bool direct_io = true;  // O_DIRECT; falls back to buffered reads whose pages are dropped where it is refused
  PolicyOptions policy = {};
  // Prefetches what expect() told of each layer's next pass, as an oracle that errs: for measurement.
  std::optional<double> oracle_recall = std::nullopt;
  uint64_t oracle_seed = 0;
};

// Threading: one executor thread calls begin/take/release/end; loader threads are private; counters() and
// resize() may be called from any thread between passes. A loader's failure is thrown by take() in the executor.
class ExpertMemory {
 public:
  // Opens the files and checks that every extent lies inside its file (Error names file, offset, expected, found).
  // Maps the arena and commits (prefaults) it up to arena_bytes.
  ExpertMemory(ExpertSource source, ExpertMemoryOptions options);
  ~ExpertMemory();  // stops and joins the loader threads
  ExpertMemory(const ExpertMemory&) = delete;
  ExpertMemory& operator=(const ExpertMemory&) = delete;

  const ExpertSource& source() const;

  // ---- a prompt's pass, streamed: between passes (docs/prefill.md). take() then gives a group at a time, in order.
  // may_read_early: [layer]. is_first: of its prompt.
  void begin_stream(const StreamOptions& options, const std::vector<bool>& may_read_early, bool is_first);
  // Always called after begin_stream(): what is still on its way is dropped.
  void end_stream();

  // ---- one layer of a pass
  // ids: the distinct experts that have routes, ascending; num_routes: how many each has (empty: one). Pins those that
  // are ready (hits) and queues the others in ascending order; the policy says which experts that the layer does not
  // need make room. No read of an expert outside `ids` starts. When they do not all fit, the rest is loaded as slots
  // are released (docs/policies.md, "A layer that does not fit"). What is decided does not depend on when reads end,
  // provided that the caller releases what it took before it takes more.
  void begin(uint32_t layer, std::span<const uint32_t> ids, std::span<const uint32_t> num_routes = {});
  // Blocks until at least one expert that was not yet taken is ready, then fills `taken` with indices into `ids`,
  // ascending: all that are ready (in_order false), or the longest run of ready ones that continues the storage order
  // (in_order true). `max_taken` bounds it. Returns false when all have been taken. Throws Error if a load failed,
  // Cancelled if should_stop (polled at least every 20 ms while waiting) says so.
  bool take(bool in_order, uint32_t max_taken, std::vector<uint32_t>& taken, const std::function<bool()>& should_stop);
  // The slot's first byte (64-byte aligned) of a taken expert, until release().
  const uint8_t* address(uint32_t index) const;
  // The last reader of a taken expert is done.
  void release(uint32_t index);
  // The layer is over, or is abandoned after an exception: pins and queued loads of it are dropped, loads in
  // flight are waited for. Always called after begin().
  void end();

  // For policies with an oracle, between layers: what later passes will route to, one layer's distinct experts at a
  // time, passes in order, layers in order. Such a policy refuses other routes than were announced.
  void expect(uint32_t layer, std::span<const uint32_t> ids);

  ExpertCounters counters() const;
  // From now on what happens is kept for a replay (read_events.h). take_events() returns what was kept since it was
  // last called, and the counters at that moment.
  void record_events();
  std::vector<uint32_t> take_events(ExpertCounters& counters);
  void record_timeline(bool on);
  Timeline take_timeline();
  // Lowers (or raises) the ceiling between passes; evicts and gives pages back to the system until it holds.
  void resize(uint64_t arena_bytes);
  uint64_t arena_bytes() const;
  uint64_t committed_bytes() const;
  uint32_t num_slots() const;         // slots of the largest record that arena_bytes holds
  uint64_t resident_experts() const;  // experts ready now
  uint64_t total_experts() const;
  // What loading each expert of the layer adds to bytes_read, provided that no read falls short.
  std::vector<uint64_t> read_bytes(uint32_t layer) const;
  // What this object will hold besides the arena, for the plan; from the source alone: tables and staging buffers, not
  // the loader threads' stacks and not page tables.
  static uint64_t overhead_bytes(const ExpertSource& source, const ExpertMemoryOptions& options);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Tests inject delays and failures here; null in production. Called by a loader thread before each read; may sleep;
// a non-zero return is taken as that errno, -1 as a short read.
using ReadHook = std::function<int(const std::string& file, uint64_t offset, uint64_t nbytes)>;
void set_read_hook(ReadHook hook);

}  // namespace headrace
