#include "experts/expert_memory.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <set>
#include <utility>

#include "experts/arena.h"
#include "experts/loader.h"
#include "experts/lru.h"
#include "experts/source_files.h"
#include "support/error.h"

namespace headrace {
namespace {

constexpr uint32_t kNone = UINT32_MAX;
constexpr auto kPollInterval = std::chrono::milliseconds(10);

// docs/concurrency.md says who may change what, and how a slot moves from one to the next.
enum class SlotState : uint8_t { kEmpty, kLoading, kReady, kInUse, kResident };

struct Slot {
  SlotState state = SlotState::kEmpty;
  bool was_taken = false;        // since it was loaded
  uint32_t layer = kNone;        // of its expert, unless empty
  uint32_t expert = kNone;       // all layers' experts counted through
  uint32_t lease_index = kNone;  // which of the layer in progress waits for it or pins it
  uint64_t bytes_read = 0;       // what loading it cost
};

// The layer in progress.
struct Lease {
  enum class Status : uint8_t { kQueued, kLoading, kReady, kTaken, kReleased, kFailed };
  struct Entry {
    uint32_t expert = 0;
    uint32_t slot = kNone;
    Status status = Status::kQueued;
  };
  bool active = false;
  uint32_t layer = 0;
  uint64_t record_bytes = 0;
  std::vector<Entry> entries;   // as ids
  std::vector<uint32_t> queue;  // entries that wait for room, descending: the next one is at the back
  uint32_t num_loading = 0;
  uint32_t num_taken = 0;
  std::string error;  // the first load that failed
};

uint64_t largest_record(const ExpertSource& source) {
  uint64_t most = 0;
  for (const LayerExperts& layer : source.layers) {
    if (layer.num_experts > 0) most = std::max(most, record_bytes(layer));
  }
  return most;
}

uint32_t count_experts(const ExpertSource& source) {
  uint64_t n = 0;
  for (const LayerExperts& layer : source.layers) n += layer.num_experts;
  return static_cast<uint32_t>(n);
}

}  // namespace

struct ExpertMemory::Impl {
  using Status = Lease::Status;

  const pid_t pid = getpid();
  SourceFiles files;
  const ExpertSource source;
  std::vector<uint32_t> first_expert;  // [layer]

  mutable std::mutex mutex;  // guards everything down to `loader`
  std::condition_variable landed;
  uint64_t arena_bytes;
  Arena arena;  // as many slots as experts: slots never run out, bytes do
  std::vector<Slot> slots;
  std::vector<uint32_t> slot_of;                        // [expert], kNone if absent
  std::set<std::pair<uint64_t, uint32_t>> empty_slots;  // (committed bytes, slot)
  std::set<uint32_t> slack_slots;                       // not empty, with more committed than their record
  Lru lru;                                              // over slots
  uint64_t used_bytes = 0;                              // records of all slots that are not empty
  uint64_t evictable_bytes = 0;                         // records of resident slots
  ExpertCounters counters;
  Lease lease;

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
        arena_bytes(options.arena_bytes),
        arena(count_experts(source), largest_record(source)),
        slots(arena.num_slots()),
        slot_of(arena.num_slots(), kNone),
        lru(arena.num_slots()),
        loader(source, files, options.loader_threads, [this](const Loader::Report& report) {
          std::lock_guard lock(mutex);
          land(report);
          landed.notify_all();
        }) {
    uint32_t n = 0;
    for (const LayerExperts& layer : source.layers) {
      first_expert.push_back(n);
      n += layer.num_experts;
    }
    for (uint32_t s = 0; s < arena.num_slots(); ++s) empty_slots.emplace(0, s);
    commit_spare();
  }

  // ---- bytes

  uint64_t slot_bytes(const Slot& slot) const { return record_bytes(source.layers[slot.layer]); }

  // Faults in whole empty slots as long as the ceiling allows, so that a pass seldom has to.
  void commit_spare() {
    while (!empty_slots.empty() && empty_slots.begin()->first == 0 &&
           arena.committed_bytes() + arena.stride_bytes() <= arena_bytes) {
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
      return want > arena_bytes ? round_up(want - arena_bytes, kPage) : 0;
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

  // Evicts until a record of the layer in progress fits, or changes nothing if that cannot be.
  bool make_room() {
    const uint64_t record = lease.record_bytes;
    if (used_bytes - evictable_bytes + record > arena_bytes) return false;
    while (used_bytes + record > arena_bytes) {
      evict(lru.victim([&](uint32_t s) { return slots[s].state == SlotState::kResident; }));
    }
    return true;
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
    used_bytes += bytes;
    return s;
  }

  void empty_slot(uint32_t s) {
    Slot& slot = slots[s];
    used_bytes -= slot_bytes(slot);
    slot_of[slot.expert] = kNone;
    lru.remove(s);
    slack_slots.erase(s);
    slot = Slot();
    empty_slots.emplace(arena.committed_bytes(s), s);
  }

  void evict(uint32_t s) {
    if (!slots[s].was_taken) counters.bytes_unused += slots[s].bytes_read;
    evictable_bytes -= slot_bytes(slots[s]);
    empty_slot(s);
  }

  // ---- the layer in progress

  void pin(uint32_t s, uint32_t index) {
    if (slots[s].state == SlotState::kResident) {
      evictable_bytes -= slot_bytes(slots[s]);
      slots[s].state = SlotState::kReady;
    }
    slots[s].lease_index = index;
    lru.use(s);
  }

  void unpin(uint32_t s) {
    slots[s].state = SlotState::kResident;
    slots[s].lease_index = kNone;
    evictable_bytes += slot_bytes(slots[s]);
  }

  // Starts queued loads, in storage order, as long as there is room.
  void admit() {
    while (!lease.queue.empty() && lease.error.empty() && make_room()) {
      const uint32_t index = lease.queue.back();
      Lease::Entry& entry = lease.entries[index];
      uint32_t s = kNone;
      try {
        s = occupy_slot(lease.record_bytes);
      } catch (const Error& e) {
        lease.error = e.what();
        return;
      }
      lease.queue.pop_back();
      Slot& slot = slots[s];
      slot.state = SlotState::kLoading;
      slot.layer = lease.layer;
      slot.expert = first_expert[lease.layer] + entry.expert;
      slot.lease_index = index;
      slot_of[slot.expert] = s;
      lru.use(s);
      entry.slot = s;
      entry.status = Status::kLoading;
      ++lease.num_loading;
      loader.submit(lease.layer, entry.expert, s, arena.slot(s));
    }
  }

  // Where the next load finds no room and a hit lies behind it in storage order, the furthest such hit becomes a load.
  // What is ready behind the head of the queue is always a hit: loads are admitted in storage order.
  void give_up_furthest_hit() {
    const uint32_t head = lease.queue.back();
    for (uint32_t i = static_cast<uint32_t>(lease.entries.size()); i-- > head + 1;) {
      Lease::Entry& entry = lease.entries[i];
      if (entry.status != Status::kReady) continue;
      unpin(entry.slot);
      evict(entry.slot);
      entry = {entry.expert, kNone, Status::kQueued};
      lease.queue.insert(std::upper_bound(lease.queue.begin(), lease.queue.end(), i, std::greater<>()), i);
      --counters.hits;
      ++counters.loads;
      return;
    }
  }

  void land(const Loader::Report& report) {
    Slot& slot = slots[report.slot];
    counters.bytes_read += report.bytes_read;
    slot.bytes_read = report.bytes_read;
    Lease::Entry* entry = slot.lease_index == kNone ? nullptr : &lease.entries[slot.lease_index];
    if (entry) --lease.num_loading;
    if (report.outcome == Loader::Outcome::kWhole) {
      if (entry) {
        slot.state = SlotState::kReady;
        entry->status = Status::kReady;
      } else {
        unpin(report.slot);
      }
      return;
    }
    counters.bytes_unused += report.bytes_read;
    if (entry) {
      entry->status = Status::kFailed;
      entry->slot = kNone;
      if (lease.error.empty()) lease.error = report.error;
    }
    empty_slot(report.slot);
  }

  void begin(uint32_t layer, std::span<const uint32_t> ids) {
    std::lock_guard lock(mutex);
    if (lease.active) throw Error("expert memory: begin() before end() of layer " + std::to_string(lease.layer));
    if (layer >= source.layers.size()) {
      throw Error("expert memory: expected a layer below " + std::to_string(source.layers.size()) + ", found " +
                  std::to_string(layer));
    }
    const LayerExperts& experts = source.layers[layer];
    for (size_t i = 0; i < ids.size(); ++i) {
      if (ids[i] >= experts.num_experts || (i > 0 && ids[i] <= ids[i - 1])) {
        throw Error("expert memory: layer " + std::to_string(layer) + ": expected ascending expert ids below " +
                    std::to_string(experts.num_experts) + ", found " + std::to_string(ids[i]));
      }
    }
    lease = Lease();
    lease.active = true;
    lease.layer = layer;
    lease.record_bytes = record_bytes(experts);
    for (uint32_t i = 0; i < ids.size(); ++i) {
      const uint32_t s = slot_of[first_expert[layer] + ids[i]];
      Lease::Entry& entry = lease.entries.emplace_back(Lease::Entry{ids[i], s, Status::kQueued});
      if (s == kNone) {
        ++counters.loads;
        lease.queue.push_back(i);
        continue;
      }
      if (slots[s].state == SlotState::kLoading) {
        ++counters.late_hits;
        entry.status = Status::kLoading;
        ++lease.num_loading;
      } else {
        ++counters.hits;
        entry.status = Status::kReady;
      }
      pin(s, i);
    }
    std::reverse(lease.queue.begin(), lease.queue.end());
    if (!lease.queue.empty() && !make_room()) give_up_furthest_hit();
    admit();
  }

  // Ready experts that take() may return, at most `most`.
  void find_takeable(bool in_order, uint32_t most, std::vector<uint32_t>& found) const {
    found.clear();
    for (uint32_t i = 0; i < lease.entries.size() && found.size() < most; ++i) {
      const Status status = lease.entries[i].status;
      if (status == Status::kReady) {
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
    if (lease.num_taken == lease.entries.size()) return false;

    const auto done_waiting = [&] {
      if (!lease.error.empty()) return true;
      find_takeable(in_order, max_taken, taken);
      return !taken.empty();
    };
    if (!done_waiting()) {
      if (lease.num_loading == 0) {  // the executor kept what it took, and hits hold the rest
        give_up_furthest_hit();
        admit();
      }
      if (lease.num_loading == 0 && lease.error.empty()) {
        throw Error("expert memory: layer " + std::to_string(lease.layer) +
                    ": every slot is taken; release experts before taking more");
      }
      const auto start = std::chrono::steady_clock::now();
      const auto add_wait = [&] {
        const auto waited = std::chrono::steady_clock::now() - start;
        counters.io_wait_ns += std::chrono::duration_cast<std::chrono::nanoseconds>(waited).count();
      };
      while (!landed.wait_for(lock, kPollInterval, done_waiting)) {
        lock.unlock();
        const bool stop = should_stop && should_stop();
        lock.lock();
        if (stop) {
          add_wait();
          throw Cancelled();
        }
      }
      add_wait();
    }
    if (!lease.error.empty()) {
      taken.clear();
      throw Error(lease.error);
    }
    for (const uint32_t i : taken) {
      lease.entries[i].status = Status::kTaken;
      Slot& slot = slots[lease.entries[i].slot];
      slot.state = SlotState::kInUse;
      slot.was_taken = true;
    }
    lease.num_taken += static_cast<uint32_t>(taken.size());
    return true;
  }

  void require_lease(const char* call) const {
    if (!lease.active) throw Error(std::string("expert memory: ") + call + " without begin()");
  }

  uint32_t taken_slot(uint32_t index, const char* call) const {
    require_lease(call);
    if (index >= lease.entries.size() || lease.entries[index].status != Status::kTaken) {
      throw Error(std::string("expert memory: ") + call + " expected the index of a taken expert, found " +
                  std::to_string(index));
    }
    return lease.entries[index].slot;
  }

  void release(uint32_t index) {
    std::lock_guard lock(mutex);
    const uint32_t s = taken_slot(index, "release()");
    lease.entries[index].status = Status::kReleased;
    unpin(s);
    admit();
  }

  void end() {
    std::unique_lock lock(mutex);
    if (!lease.active) return;
    lease.queue.clear();
    if (lease.num_loading > 0) {
      for (const Loader::Report& report : loader.drop()) land(report);
      landed.wait(lock, [this] { return lease.num_loading == 0; });
    }
    for (const Lease::Entry& entry : lease.entries) {
      if (entry.status == Status::kReady || entry.status == Status::kTaken) unpin(entry.slot);
    }
    lease = Lease();
  }

  void resize(uint64_t bytes) {
    std::lock_guard lock(mutex);
    if (lease.active) throw Error("expert memory: resize() during layer " + std::to_string(lease.layer));
    check_ceiling(source, bytes);
    arena_bytes = bytes;
    while (used_bytes > arena_bytes) {
      evict(lru.victim([&](uint32_t s) { return slots[s].state == SlotState::kResident; }));
    }
    trim_slack(0);
    commit_spare();
  }
};

ExpertMemory::ExpertMemory(ExpertSource source, ExpertMemoryOptions options)
    : impl_(std::make_unique<Impl>(std::move(source), options)) {}
ExpertMemory::~ExpertMemory() {
  // In a forked child the loader's threads do not exist, and what they waited on cannot be destroyed.
  if (getpid() != impl_->pid) (void)impl_.release();
}

const ExpertSource& ExpertMemory::source() const { return impl_->source; }

void ExpertMemory::begin(uint32_t layer, std::span<const uint32_t> ids) { impl_->begin(layer, ids); }
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
  return impl_->counters;
}
void ExpertMemory::resize(uint64_t arena_bytes) { impl_->resize(arena_bytes); }
uint64_t ExpertMemory::arena_bytes() const {
  std::lock_guard lock(impl_->mutex);
  return impl_->arena_bytes;
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
  return std::count_if(impl_->slots.begin(), impl_->slots.end(), [](const Slot& slot) {
    return slot.state != SlotState::kEmpty && slot.state != SlotState::kLoading;
  });
}
uint64_t ExpertMemory::total_experts() const { return impl_->arena.num_slots(); }

uint64_t ExpertMemory::overhead_bytes(const ExpertSource& source, const ExpertMemoryOptions& options) {
  uint64_t tables = 0;
  for (const LayerExperts& layer : source.layers) {
    tables += sizeof(LayerExperts) + (layer.rows.size() + layer.records.size()) * sizeof(ExpertExtent) +
              layer.crc.size() * sizeof(uint32_t);
    if (layer.num_experts > 0) tables += cut_record(layer).size() * sizeof(Piece);
  }
  // A slot's row in the tables: Slot, slot_of, two links and a mark of the Lru, committed bytes, a node of each set.
  const uint64_t row = sizeof(Slot) + 4 + 8 + 1 + 8 + 64 + 48;
  tables += count_experts(source) * row;
  return tables + options.loader_threads * staging_bytes(source);
}

}  // namespace headrace
