// Drives a ReadScheduler with the routes of a trace and no loads: what an engine with these slots and this policy would
// hit, load and evict. docs/policies.md has the rules. For one thread at a time; different simulators are independent.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <vector>

#include "experts/read_scheduler.h"
#include "experts/schedule_bound.h"

namespace headrace {

struct SimulatedPrefetch {
  double transfers_per_layer = 0;  // what the link moves while a layer runs; 0: no prefetch
  double recall = 1;               // share of the absent experts that the forecast names; wrong guesses for the others
  uint64_t seed = 0;
};

struct SimulatorOptions {
  std::vector<LayerShape> layers;
  uint64_t capacity_bytes = 0;
  PolicyOptions policy;
  bool pins = true;        // false: each expert of a layer is a request of its own
  uint32_t window = 1;     // tokens a pass
  uint32_t lookahead = 0;  // passes beyond the present one that an oracle knows
  SimulatedPrefetch prefetch;
  std::vector<uint64_t> read_bytes;  // [expert], what a load of it reads; empty: its record
  std::vector<LinkOptions> links;    // for each, how fast the loads could be at best
};

struct SimulatedCounters : Residency::Counters {
  uint64_t passes = 0;
  uint64_t bytes_read = 0;
  uint64_t prefetches_unused = 0;  // evicted before a pass used them
  uint64_t bytes_unused = 0;       // of these
  uint64_t loads_squared = 0;      // sum over passes of their loads squared
};

class Simulator {
 public:
  explicit Simulator(SimulatorOptions options);

  // ids [num_tokens, layers, top_k]; a negative id is no route. Error names the token, the layer, expected and found.
  void feed(const int32_t* ids, uint64_t num_tokens, uint32_t top_k);
  // Whatever is fed next begins a pass of its own.
  void end_pass() { queue_pass(std::nullopt); }
  // As above. events: what happened to an engine in the pass that was fed (read_events.h): it is done again, and
  // nothing else; what moved the capacity is among it. Error if that cannot be.
  void end_pass(std::span<const uint32_t> events) { queue_pass(std::vector(events.begin(), events.end())); }
  // The capacity from the pass on that is being fed, as an engine's guard moves it between passes.
  void resize(uint64_t capacity_bytes);
  // The trace is over: runs what waits.
  void finish();

  SimulatedCounters counters() const;
  const std::vector<ScheduleBound>& bounds() const { return bounds_; }  // of options.links, complete after finish()
  uint32_t num_layers() const { return static_cast<uint32_t>(options_.layers.size()); }

 private:
  struct Pass {
    std::vector<uint32_t> ids, num_routes;  // layer after layer
    std::vector<uint32_t> first;            // [layers + 1]
    uint64_t capacity_bytes = 0;
    std::optional<std::vector<uint32_t>> events;  // of a recorded pass
  };

  void queue_pass(std::optional<std::vector<uint32_t>> events);
  void run_pending(size_t kept);  // all passes that wait but the last `kept`
  void run_pass(const Pass& pass);
  void replay_pass(const Pass& pass, std::span<const uint32_t> events);
  void run_layer(uint32_t layer, std::span<const uint32_t> ids, std::span<const uint32_t> num_routes, bool is_last);
  void forecast(uint32_t layer);
  void move_prefetches();
  void land(uint32_t first_expert, bool has_failed, std::span<const uint32_t> costs);
  uint64_t read_bytes(uint32_t expert) const;

  const SimulatorOptions options_;
  uint64_t bytes_read_ = 0, bytes_unused_ = 0, prefetches_unused_ = 0;
  uint64_t num_passes_ = 0, loads_squared_ = 0, num_tokens_ = 0;
  ReadScheduler scheduler_;
  const Residency& residency_ = scheduler_.residency();
  std::vector<ScheduleBound> bounds_;

  uint32_t tokens_in_pass_ = 0;
  uint64_t capacity_bytes_;                  // of the pass that is being fed
  std::vector<uint32_t> routes_;             // [expert], of the pass that is being fed
  std::vector<std::vector<uint32_t>> used_;  // [layer]: ids with routes in it
  std::deque<Pass> pending_;                 // the next pass first

  NoisyOracle oracle_;
  uint32_t in_flight_ = Residency::kNone;  // the prefetch that the link is moving
  double left_ = 0;                        // of it
  std::vector<uint32_t> gone_, no_costs_;
};

}  // namespace headrace
