#include "experts/expert_memory.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <set>
#include <utility>

#include "experts/arena.h"
#include "experts/loader.h"
#include "experts/read_scheduler.h"
#include "experts/source_files.h"
#include "support/error.h"

namespace headrace {
namespace {

constexpr uint32_t kNone = UINT32_MAX;
using State = Residency::State;
using Status = Residency::Status;
using Clock = std::chrono::steady_clock;
constexpr auto kPollInterval = std::chrono::milliseconds(10);

struct Slot {
  uint32_t layer = kNone;   // of its expert; kNone: the slot is empty
  uint32_t expert = kNone;  // all layers' experts counted through
  uint64_t bytes_read = 0;  // what loading it cost
};

uint64_t largest_record(const ExpertSource& source) {
  uint64_t most = 0;
  for (const LayerExperts& layer : source.layers) {
    if (layer.num_experts > 0) most = std::max(most, record_bytes(layer));
  }
  return most;
}

std::vector<LayerShape> layer_shapes(const ExpertSource& source) {
  std::vector<LayerShape> shapes;
  for (const LayerExperts& layer : source.layers) {
    shapes.push_back({layer.num_experts, layer.num_experts > 0 ? record_bytes(layer) : 0});
  }
  return shapes;
}

uint32_t count_experts(const ExpertSource& source) {
  uint64_t n = 0;
  for (const LayerExperts& layer : source.layers) n += layer.num_experts;
  return static_cast<uint32_t>(n);
}

}  // namespace

struct ExpertMemory::Impl {
  const pid_t pid = getpid();
  SourceFiles files;
  const ExpertSource source;

  mutable std::mutex mutex;  // guards everything down to `loader`
  std::condition_variable landed;
  ReadScheduler scheduler;  // decides; what follows carries it out
  const Residency& residency = scheduler.residency();
  Arena arena;  // as many slots as experts: slots never run out, bytes do
  std::vector<Slot> slots;
  std::vector<uint32_t> slot_of;                        // [expert], kNone if absent
  std::set<std::pair<uint64_t, uint32_t>> empty_slots;  // (committed bytes, slot)
  std::set<uint32_t> slack_slots;                       // not empty, with more committed than their record
  uint64_t bytes_read = 0, bytes_unused = 0, io_wait_ns = 0, io_busy_ns = 0;
  Clock::time_point busy_since;
  uint32_t num_taken = 0;  // of the layer in progress
  std::string error;       // the first load of it that failed
  std::vector<uint32_t> gone, costs;

  std::optional<NoisyOracle> oracle;
  std::vector<std::deque<std::vector<uint32_t>>> future;  // [layer]: what passes to come need, for the oracle

  std::optional<Clock::time_point> timeline_start;
  Timeline timeline;
  std::vector<std::pair<uint32_t, double>> read_starts;  // (first expert, when)
  std::vector<uint32_t> routes;                          // [index], of the layer in progress
  uint32_t num_unreleased = 0;                           // of what take() gave last

  Loader loader;  // last, so that its threads end before what they touch

  // The source is checked before anything is made from its sizes.
  static ExpertSource checked(ExpertSource source, const SourceFiles& files, const ExpertMemoryOptions& options) {
    check_source(source, files.sizes());
    if (options.loader_threads < 1 || options.loader_threads > 64) {
      throw Error("expert memory: expected 1 to 64 loader threads, found " + std::to_string(options.loader_threads));
    }
    check_ceiling(source, options.arena_bytes);
    return source;
  }

  static void check_ceiling(const ExpertSource& source, uint64_t arena_bytes) {
    if (arena_bytes >= largest_record(source)) return;
    throw Error("expert memory: expected an arena of at least the largest expert's " +
                std::to_string(largest_record(source)) + " bytes, found " + std::to_string(arena_bytes));
  }

  Impl(ExpertSource unchecked, const ExpertMemoryOptions& options)
      : files(unchecked.files, options.direct_io),
        source(checked(std::move(unchecked), files, options)),
        scheduler(layer_shapes(source), options.arena_bytes, options.policy,
                  [this](uint32_t expert, bool was_taken) { evict(expert, was_taken); }),
        arena(count_experts(source), largest_record(source)),
        slots(arena.num_slots()),
        slot_of(arena.num_slots(), kNone),
        loader(source, files, options.loader_threads, [this](const Loader::Report& report) {
          std::lock_guard lock(mutex);
          land(report);
          start_reads();
          landed.notify_all();
        }) {
    for (uint32_t s = 0; s < arena.num_slots(); ++s) empty_slots.emplace(0, s);
    if (options.oracle_recall) oracle.emplace(*options.oracle_recall, options.oracle_seed);
    future.resize(source.layers.size());
    commit_spare();
  }

  // ---- bytes

  uint64_t slot_bytes(const Slot& slot) const { return record_bytes(source.layers[slot.layer]); }

  // Faults in whole empty slots as long as the ceiling allows, so that a pass seldom has to.
  void commit_spare() {
    while (!empty_slots.empty() && empty_slots.begin()->first == 0 &&
           arena.committed_bytes() + arena.stride_bytes() <= residency.capacity_bytes()) {
      const uint32_t s = empty_slots.begin()->second;
      arena.grow(s, arena.stride_bytes());
      empty_slots.erase(empty_slots.begin());
      empty_slots.emplace(arena.committed_bytes(s), s);
    }
  }

  // Gives back slack, empty slots first, until `more` bytes can be committed under the ceiling.
  void trim_slack(uint64_t more) {
    const auto excess = [&] {
      const uint64_t want = arena.committed_bytes() + more;
      return want > residency.capacity_bytes() ? round_up(want - residency.capacity_bytes(), kPage) : 0;
    };
    while (excess() > 0 && !empty_slots.empty() && empty_slots.rbegin()->first > 0) {
      const auto [committed, s] = *empty_slots.rbegin();
      empty_slots.erase({committed, s});
      arena.trim(s, committed - std::min(committed, excess()));
      empty_slots.emplace(arena.committed_bytes(s), s);
    }
    while (excess() > 0 && !slack_slots.empty()) {
      const uint32_t s = *slack_slots.begin();
      arena.trim(s, slot_bytes(slots[s]));
      slack_slots.erase(s);
    }
  }

  // An empty slot with `bytes` committed; the one that fits best. There is room.
  uint32_t occupy_slot(uint64_t bytes) {
    auto best = empty_slots.lower_bound({bytes, 0});
    if (best == empty_slots.end()) --best;  // the largest, to grow
    const auto [committed, s] = *best;
    empty_slots.erase(best);
    if (committed < bytes) {
      try {
        trim_slack(bytes - committed);
        arena.grow(s, bytes);
      } catch (...) {
        empty_slots.emplace(arena.committed_bytes(s), s);
        throw;
      }
    }
    if (committed > bytes) slack_slots.insert(s);
    return s;
  }

  void empty_slot(uint32_t s) {
    slot_of[slots[s].expert] = kNone;
    slack_slots.erase(s);
    slots[s] = Slot();
    empty_slots.emplace(arena.committed_bytes(s), s);
  }

  void evict(uint32_t expert, bool was_taken) {
    const uint32_t s = slot_of[expert];
    if (!was_taken) bytes_unused += slots[s].bytes_read;
    empty_slot(s);
  }

  // ---- the layer in progress

  // Starts the reads that may start.
  void start_reads() {
    ReadScheduler::Read read;
    while (error.empty() && scheduler.next(read)) {
      const uint32_t layer = residency.layer_of(read.experts[0]), first = residency.first_expert(layer);
      Loader::Request request{layer, {}, !read.is_guess, read.is_group ? 1 : UINT32_MAX};
      try {
        for (const uint32_t expert : read.experts) {
          const uint32_t s = occupy_slot(record_bytes(source.layers[layer]));
          slots[s].layer = layer;
          slots[s].expert = expert;
          slot_of[expert] = s;
          request.targets.push_back({expert - first, s, arena.slot(s)});
        }
      } catch (const Error& e) {
        error = e.what();
        costs.assign(read.experts.size(), 0);
        scheduler.failed(read.experts[0], costs, gone);
        for (const uint32_t expert : gone) {
          if (slot_of[expert] != kNone) empty_slot(slot_of[expert]);
        }
        return;
      }
      const auto now = Clock::now();
      if (scheduler.num_in_flight() == 1) busy_since = now;
      if (timeline_start) read_starts.emplace_back(read.experts[0], seconds(now));
      loader.submit(std::move(request));
    }
  }

  double seconds(Clock::time_point time) const { return std::chrono::duration<double>(time - *timeline_start).count(); }

  static uint64_t ns_since(Clock::time_point start) {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start).count();
  }

  // A read is over.
  void land(const Loader::Report& report) {
    const uint32_t first = slots[report.items[0].slot].expert;
    bool is_whole = true;
    costs.clear();
    uint64_t cost = 0;
    for (const Loader::Item& item : report.items) {
      const bool is_here = item.outcome == Loader::Outcome::kWhole || residency.is_unwanted(slots[item.slot].expert);
      is_whole = is_whole && is_here;
      slots[item.slot].bytes_read = item.bytes_read;
      costs.push_back(static_cast<uint32_t>(item.bytes_read));
      cost += item.bytes_read;
    }
    bytes_read += cost;
    note_read(first, static_cast<uint32_t>(report.items.size()), cost);
    if (is_whole) {
      scheduler.landed(first, costs, gone);
    } else {
      // A guess that fails is no error: should its layer want the expert, it is read once more.
      const bool is_wanted = std::any_of(report.items.begin(), report.items.end(), [&](const Loader::Item& item) {
        return residency.entry_of(slots[item.slot].expert) != kNone;
      });
      if (is_wanted && error.empty()) error = report.error;
      scheduler.failed(first, costs, gone);
    }
    if (scheduler.num_in_flight() == 0) io_busy_ns += ns_since(busy_since);
    for (const uint32_t expert : gone) {
      bytes_unused += slots[slot_of[expert]].bytes_read;
      empty_slot(slot_of[expert]);
    }
  }

  void note_read(uint32_t first, uint32_t num_experts, uint64_t bytes) {
    if (!timeline_start) return;
    const auto at = std::find_if(read_starts.begin(), read_starts.end(),
                                 [first](const auto& start) { return start.first == first; });
    if (at == read_starts.end()) return;
    const uint32_t layer = residency.layer_of(first);
    timeline.reads.push_back(
        {layer, first - residency.first_expert(layer), num_experts, bytes, at->second, seconds(Clock::now())});
    read_starts.erase(at);
  }

  // Reads may start again, and do.
  void resume() {
    scheduler.hold(false);
    start_reads();
  }

  // Drops reads under way and waits for those that cannot be. None starts until resume().
  void drop_reads(std::unique_lock<std::mutex>& lock, const std::function<bool(uint32_t slot)>& is_meant) {
    scheduler.hold(true);
    for (const Loader::Report& report : loader.drop(is_meant)) land(report);
    const auto is_over = [&] {
      for (uint32_t s = 0; s < slots.size(); ++s) {
        if (slots[s].expert != kNone && residency.state(slots[s].expert) == State::kLoading && is_meant(s))
          return false;
      }
      return true;
    };
    landed.wait(lock, is_over);
  }

  void begin_stream(const StreamOptions& options, const std::vector<bool>& may_read_early, bool is_first) {
    std::unique_lock lock(mutex);
    if (residency.is_active() || residency.is_streaming()) throw Error("expert memory: begin_stream() during a pass");
    if (options.group_size < 1 || options.queue_depth < 1 || options.banks < 1) {
      throw Error("expert memory: expected at least 1 expert a group, 1 read in flight and 1 bank");
    }
    drop_reads(lock, [](uint32_t) { return true; });
    error.clear();
    scheduler.begin_stream(options, may_read_early, is_first);
    resume();
  }

  void end_stream() {
    std::unique_lock lock(mutex);
    if (!residency.is_streaming()) return;
    drop_reads(lock, [](uint32_t) { return true; });
    if (oracle) {
      for (uint32_t layer = 0; layer < source.layers.size(); ++layer) forecast(layer);
    }
    scheduler.end_stream();
    resume();
  }

  // What the oracle says of the layer's next pass.
  void forecast(uint32_t layer) {
    if (future[layer].empty()) return scheduler.forecast(layer, {});
    scheduler.forecast(layer,
                       oracle->forecast(residency, layer, source.layers[layer].num_experts, future[layer].front()));
  }

  void check_ids(const char* call, uint32_t layer, std::span<const uint32_t> ids) const {
    if (layer >= source.layers.size()) {
      throw Error(std::string("expert memory: ") + call + " expected a layer below " +
                  std::to_string(source.layers.size()) + ", found " + std::to_string(layer));
    }
    const uint32_t n = source.layers[layer].num_experts;
    for (size_t i = 0; i < ids.size(); ++i) {
      if (ids[i] >= n || (i > 0 && ids[i] <= ids[i - 1])) {
        throw Error("expert memory: layer " + std::to_string(layer) + ": " + call +
                    " expected ascending expert ids below " + std::to_string(n) + ", found " + std::to_string(ids[i]));
      }
    }
  }

  void begin(uint32_t layer, std::span<const uint32_t> ids, std::span<const uint32_t> num_routes) {
    std::lock_guard lock(mutex);
    if (residency.is_active()) {
      throw Error("expert memory: begin() before end() of layer " + std::to_string(residency.layer()));
    }
    check_ids("begin()", layer, ids);
    if (!num_routes.empty() && num_routes.size() != ids.size()) {
      throw Error("expert memory: begin() expected as many numbers of routes as ids, " + std::to_string(ids.size()) +
                  ", found " + std::to_string(num_routes.size()));
    }
    error.clear();
    num_taken = 0;
    if (oracle && !future[layer].empty() && !ids.empty()) future[layer].pop_front();
    scheduler.hold(true);  // first what nobody asked for makes room
    scheduler.observe(layer, ids);
    scheduler.begin(layer, ids, num_routes);
    for (const uint32_t expert : residency.unwanted()) {
      if (const auto report = loader.cancel(slot_of[expert])) land(*report);
    }
    for (const Residency::Entry& entry : residency.entries()) {
      if (entry.was_late) loader.promote(slot_of[entry.expert]);
    }
    if (timeline_start && residency.is_streaming()) {
      timeline.layers.push_back({layer, seconds(Clock::now())});
      routes.assign(num_routes.begin(), num_routes.end());
    }
    resume();
  }

  void expect(uint32_t layer, std::span<const uint32_t> ids) {
    std::lock_guard lock(mutex);
    check_ids("expect()", layer, ids);
    scheduler.expect(layer, ids);
    if (oracle && !ids.empty()) future[layer].emplace_back(ids.begin(), ids.end());
  }

  // Ready experts that take() may return, at most `most`.
  void find_takeable(bool in_order, uint32_t most, std::vector<uint32_t>& found) const {
    found.clear();
    const auto& entries = residency.entries();
    in_order = in_order || residency.is_streaming();
    for (uint32_t i = 0; i < entries.size() && found.size() < most; ++i) {
      const Status status = entries[i].status;
      if (status == Status::kReady) {
        if (!found.empty() && !residency.is_same_group(entries[found[0]].expert, entries[i].expert)) return;
        found.push_back(i);
      } else if (in_order && status != Status::kTaken && status != Status::kReleased) {
        return;
      }
    }
  }

  bool take(bool in_order, uint32_t max_taken, std::vector<uint32_t>& taken, const std::function<bool()>& should_stop) {
    std::unique_lock lock(mutex);
    require_lease("take()");
    if (max_taken == 0) throw Error("expert memory: take() expected max_taken of at least 1, found 0");
    taken.clear();
    if (num_taken == residency.entries().size()) return false;

    const auto done_waiting = [&] {
      if (!error.empty()) return true;
      find_takeable(in_order, max_taken, taken);
      return !taken.empty();
    };
    if (!done_waiting()) {
      const auto start = Clock::now();
      const auto add_wait = [&] { io_wait_ns += ns_since(start); };
      // Nothing can land: the executor kept what it took, and what it did not holds the rest.
      const auto is_stuck = [&] {
        const bool is_waiting = residency.is_streaming() ? scheduler.num_in_flight() > 0 : residency.num_loading() > 0;
        return !is_waiting && !done_waiting();
      };
      do {
        if (is_stuck() && scheduler.make_room_in_layer()) start_reads();
        if (is_stuck()) {
          throw Error("expert memory: layer " + std::to_string(residency.layer()) +
                      ": every slot is taken; release experts before taking more");
        }
        lock.unlock();
        const bool stop = should_stop && should_stop();
        lock.lock();
        if (stop) {
          add_wait();
          throw Cancelled();
        }
      } while (!landed.wait_for(lock, kPollInterval, done_waiting));
      add_wait();
    }
    if (!error.empty()) {
      taken.clear();
      throw Error(error);
    }
    for (const uint32_t i : taken) scheduler.take(i);
    num_taken += static_cast<uint32_t>(taken.size());
    note_take(taken);
    return true;
  }

  void note_take(const std::vector<uint32_t>& taken) {
    if (!timeline_start || !residency.is_streaming()) return;
    const uint32_t layer = residency.layer();
    uint32_t num_routes = 0;
    for (const uint32_t i : taken) num_routes += i < routes.size() ? routes[i] : 1;
    const uint32_t first = residency.entries()[taken[0]].expert - residency.first_expert(layer);
    num_unreleased = static_cast<uint32_t>(taken.size());
    timeline.computes.push_back({layer, first, num_unreleased, num_routes, seconds(Clock::now()), 0});
  }

  void note_release() {
    if (!timeline_start || num_unreleased == 0 || --num_unreleased > 0) return;
    timeline.computes.back().end_s = seconds(Clock::now());
  }

  void require_lease(const char* call) const {
    if (!residency.is_active()) throw Error(std::string("expert memory: ") + call + " without begin()");
  }

  uint32_t taken_slot(uint32_t index, const char* call) const {
    require_lease(call);
    const auto& entries = residency.entries();
    if (index >= entries.size() || entries[index].status != Status::kTaken) {
      throw Error(std::string("expert memory: ") + call + " expected the index of a taken expert, found " +
                  std::to_string(index));
    }
    return slot_of[entries[index].expert];
  }

  void release(uint32_t index) {
    std::lock_guard lock(mutex);
    taken_slot(index, "release()");
    note_release();
    scheduler.release(index);
    start_reads();
  }

  void end() {
    std::unique_lock lock(mutex);
    if (!residency.is_active()) return;
    scheduler.drop_queue();
    if (residency.num_loading() > 0) {
      drop_reads(lock, [this](uint32_t s) { return residency.entry_of(slots[s].expert) != kNone; });
    }
    if (oracle && !residency.is_streaming()) forecast(residency.layer());
    const bool is_given_up = residency.is_streaming() && num_taken < residency.entries().size();
    if (is_given_up) scheduler.hold(true);  // what started now, end_stream() would wait for
    scheduler.end();
    if (!is_given_up) resume();
  }

  ExpertCounters counters() const {
    const Residency::Counters& c = residency.counters();
    ExpertCounters out;
    out.hits = c.hits;
    out.late_hits = c.late_hits;
    out.loads = c.loads;
    out.prefetches = c.prefetches;
    out.evictions = c.evictions;
    out.bytes_read = bytes_read;
    out.bytes_unused = bytes_unused;
    out.io_wait_ns = io_wait_ns;
    out.io_busy_ns = io_busy_ns + (scheduler.num_in_flight() > 0 ? ns_since(busy_since) : 0);
    return out;
  }

  void resize(uint64_t bytes) {
    std::unique_lock lock(mutex);
    if (residency.is_active() || residency.is_streaming()) {
      throw Error("expert memory: resize() during layer " + std::to_string(residency.layer()));
    }
    check_ceiling(source, bytes);
    drop_reads(lock, [](uint32_t) { return true; });  // prefetches
    scheduler.resize(bytes);
    trim_slack(0);
    commit_spare();
    resume();
  }
};

ExpertMemory::ExpertMemory(ExpertSource source, ExpertMemoryOptions options)
    : impl_(std::make_unique<Impl>(std::move(source), options)) {}
ExpertMemory::~ExpertMemory() {
  // In a forked child the loader's threads do not exist, and what they waited on cannot be destroyed.
  if (getpid() != impl_->pid) (void)impl_.release();
}

const ExpertSource& ExpertMemory::source() const { return impl_->source; }

void ExpertMemory::begin(uint32_t layer, std::span<const uint32_t> ids, std::span<const uint32_t> num_routes) {
  impl_->begin(layer, ids, num_routes);
}
void ExpertMemory::begin_stream(const StreamOptions& options, const std::vector<bool>& may_read_early, bool is_first) {
  impl_->begin_stream(options, may_read_early, is_first);
}
void ExpertMemory::end_stream() { impl_->end_stream(); }
void ExpertMemory::expect(uint32_t layer, std::span<const uint32_t> ids) { impl_->expect(layer, ids); }
bool ExpertMemory::take(bool in_order, uint32_t max_taken, std::vector<uint32_t>& taken,
                        const std::function<bool()>& should_stop) {
  return impl_->take(in_order, max_taken, taken, should_stop);
}
const uint8_t* ExpertMemory::address(uint32_t index) const {
  std::lock_guard lock(impl_->mutex);
  return impl_->arena.slot(impl_->taken_slot(index, "address()"));
}
void ExpertMemory::release(uint32_t index) { impl_->release(index); }
void ExpertMemory::end() { impl_->end(); }

ExpertCounters ExpertMemory::counters() const {
  std::lock_guard lock(impl_->mutex);
  return impl_->counters();
}
void ExpertMemory::record_events() {
  std::lock_guard lock(impl_->mutex);
  impl_->scheduler.log().is_on = true;
  impl_->scheduler.resize(impl_->residency.capacity_bytes());  // where it begins
}
std::vector<uint32_t> ExpertMemory::take_events(ExpertCounters& counters) {
  std::lock_guard lock(impl_->mutex);
  counters = impl_->counters();
  return impl_->scheduler.log().take();
}
void ExpertMemory::record_timeline(bool on) {
  std::lock_guard lock(impl_->mutex);
  impl_->timeline = {};
  impl_->read_starts.clear();
  impl_->timeline_start.reset();
  if (on) impl_->timeline_start = Clock::now();
}
Timeline ExpertMemory::take_timeline() {
  std::lock_guard lock(impl_->mutex);
  return std::exchange(impl_->timeline, {});
}
void ExpertMemory::resize(uint64_t arena_bytes) { impl_->resize(arena_bytes); }
uint64_t ExpertMemory::arena_bytes() const {
  std::lock_guard lock(impl_->mutex);
  return impl_->residency.capacity_bytes();
}
uint64_t ExpertMemory::committed_bytes() const {
  std::lock_guard lock(impl_->mutex);
  return impl_->arena.committed_bytes();
}
uint32_t ExpertMemory::num_slots() const {
  const uint64_t n = arena_bytes() / impl_->arena.stride_bytes();
  return static_cast<uint32_t>(std::min<uint64_t>(n, impl_->arena.num_slots()));
}
uint64_t ExpertMemory::resident_experts() const {
  std::lock_guard lock(impl_->mutex);
  uint64_t n = 0;
  for (const Slot& slot : impl_->slots) {
    n += slot.layer != kNone && impl_->residency.state(slot.expert) == State::kResident;
  }
  return n;
}
uint64_t ExpertMemory::total_experts() const { return impl_->arena.num_slots(); }

std::vector<uint64_t> ExpertMemory::read_bytes(uint32_t layer) const {
  impl_->check_ids("read_bytes()", layer, {});
  const LayerExperts& experts = impl_->source.layers[layer];
  const std::vector<uint64_t> sizes = impl_->files.sizes();
  std::vector<uint64_t> out;
  for (uint32_t e = 0; e < experts.num_experts; ++e) out.push_back(headrace::read_bytes(experts, e, sizes));
  return out;
}

uint64_t ExpertMemory::overhead_bytes(const ExpertSource& source, const ExpertMemoryOptions& options) {
  uint64_t tables = 0;
  for (const LayerExperts& layer : source.layers) {
    tables += sizeof(LayerExperts) + (layer.rows.size() + layer.records.size()) * sizeof(ExpertExtent) +
              layer.crc.size() * sizeof(uint32_t);
    if (layer.num_experts > 0) tables += cut_record(layer).size() * sizeof(Piece);
  }
  // A slot's row in the tables: Slot, slot_of, committed bytes, a node of each set.
  const uint64_t row = sizeof(Slot) + 4 + 8 + 64 + 48;
  tables += count_experts(source) * row + Residency::overhead_bytes(layer_shapes(source), options.policy);
  return tables + options.loader_threads * staging_bytes(source);
}

}  // namespace headrace
