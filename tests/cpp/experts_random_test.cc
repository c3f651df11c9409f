// Random layers, ids, budgets, record sizes, sources, threads, delays and failures, against what must always hold.
#include <atomic>
#include <cerrno>
#include <chrono>
#include <list>
#include <map>
#include <mutex>
#include <set>
#include <thread>

#include "check.h"
#include "expert_files.h"

using namespace headrace;

namespace {

using Ids = std::vector<uint32_t>;

std::vector<LayerSpec> specs(std::mt19937_64& random) {
  const auto packed = [&] { return random() % 2 == 0; };
  std::vector<LayerSpec> all = {
      layer_spec(DType::kQ4_0, 32, 96, 12, packed()), layer_spec(DType::kQ8_0, 64, 96, 8, packed()),
      layer_spec(DType::kBF16, 37, 51, 10, packed()), layer_spec(DType::kQ4_0, 32, 96, 12, packed()),
      layer_spec(DType::kF32, 100, 90, 5, packed()),
  };
  if (random() % 3 == 0) all.push_back(layer_spec(DType::kF32, 300, 1000, 2, packed()));  // several pieces
  return all;
}

// Which expert a read belongs to: extents share no 4 KiB block.
class ReadLog {
 public:
  explicit ReadLog(const ExpertSource& source) {
    for (uint32_t f = 0; f < source.files.size(); ++f) file_index_[source.files[f]] = f;
    for (uint32_t l = 0; l < source.layers.size(); ++l) {
      const LayerExperts& layer = source.layers[l];
      for (size_t i = 0; i < layer.records.size(); ++i) add(layer.records[i], l, i);
      for (size_t i = 0; i < layer.rows.size(); ++i) add(layer.rows[i], l, i / 3);
    }
  }
  void clear() {
    std::lock_guard lock(mutex_);
    reads_.clear();
  }
  // True if this place is read for the first time since clear().
  bool record(const std::string& file, uint64_t offset) {
    std::lock_guard lock(mutex_);
    return ++reads_[{file_index_.at(file), offset}] == 1;
  }
  // Experts (layer, expert) read since clear(), each with the most often that one of its places was read.
  std::map<std::pair<uint32_t, uint32_t>, int> experts() {
    std::lock_guard lock(mutex_);
    std::map<std::pair<uint32_t, uint32_t>, int> found;
    for (const auto& [place, times] : reads_) {
      int& most = found[std::prev(starts_.upper_bound(place))->second];
      most = std::max(most, times);
    }
    return found;
  }

 private:
  using Place = std::pair<uint32_t, uint64_t>;  // file, offset
  void add(const ExpertExtent& extent, uint32_t layer, size_t expert) {
    starts_[{extent.file, extent.offset / kPage * kPage}] = {layer, static_cast<uint32_t>(expert)};
  }
  std::mutex mutex_;
  std::map<std::string, uint32_t> file_index_;
  std::map<Place, std::pair<uint32_t, uint32_t>> starts_;
  std::map<Place, int> reads_;
};

Ids random_ids(std::mt19937_64& random, uint32_t num_experts) {
  const uint64_t share = 1 + random() % 8;  // of 8
  Ids ids;
  for (uint32_t e = 0; e < num_experts; ++e) {
    if (random() % 8 < share) ids.push_back(e);
  }
  return ids;
}

struct Totals {
  uint64_t routed = 0;
  uint64_t failures = 0;
  uint64_t cancelled = 0;
};

// One layer with everything that an executor may do to it.
void random_layer(std::mt19937_64& random, ExpertMemory& memory, const ExpertFiles& files, ReadLog& log,
                  Totals& totals) {
  const uint32_t layer = random() % files.source.layers.size();
  const Ids ids = random_ids(random, files.source.layers[layer].num_experts);
  const bool in_order = random() % 2;
  const uint32_t max_taken = 1 + random() % 4;
  const uint64_t hold = random() % 3 ? 0 : 1 + random() % 2;  // taken experts kept while others are taken
  const uint64_t room = memory.arena_bytes() / record_bytes(files.source.layers[layer]);
  const bool may_hold = hold + max_taken <= room;
  const uint64_t stop_after = random() % 10 ? UINT64_MAX : random() % 4;
  const uint64_t abandon_after = random() % 10 ? UINT64_MAX : random() % 5;

  log.clear();
  const ExpertCounters before = memory.counters();
  std::set<uint32_t> seen;
  std::list<uint32_t> held;
  Ids taken;
  uint64_t asked = 0;
  bool whole = false;
  memory.begin(layer, ids);
  try {
    uint32_t last = 0;
    for (;;) {
      if (seen.size() >= abandon_after) break;
      if (!memory.take(in_order, max_taken, taken, [&] { return ++asked > stop_after; })) {
        whole = true;
        break;
      }
      CHECK(!taken.empty() && taken.size() <= max_taken);
      CHECK(memory.committed_bytes() <= memory.arena_bytes());
      for (uint32_t i : taken) {
        CHECK(i < ids.size());
        CHECK(seen.insert(i).second);
        if (in_order) CHECK_EQ(i, last);
        last = i + 1;
        CHECK(files.slot_equals(layer, ids[i], memory.address(i)));
        held.push_back(i);
      }
      while (held.size() > (may_hold ? hold : 0)) {
        const uint32_t i = random() % 2 ? held.front() : held.back();
        CHECK(files.slot_equals(layer, ids[i], memory.address(i)));  // pinned, so still there
        held.remove(i);
        memory.release(i);
      }
    }
    if (whole) CHECK_EQ(seen.size(), ids.size());
  } catch (const Cancelled&) {
    ++totals.cancelled;
  } catch (const Error& e) {
    ++totals.failures;
    CHECK(std::strstr(e.what(), ("layer " + std::to_string(layer) + " expert ").c_str()));
    CHECK(std::strstr(e.what(), "Input/output error"));
  }
  memory.end();
  totals.routed += ids.size();

  const ExpertCounters after = memory.counters();
  CHECK_EQ(after.hits + after.late_hits + after.loads, totals.routed);
  CHECK(after.bytes_unused <= after.bytes_read);
  CHECK(memory.committed_bytes() <= memory.arena_bytes());
  const auto read = log.experts();
  if (whole) CHECK_EQ(read.size(), after.loads - before.loads);
  CHECK(read.size() <= after.loads - before.loads);
  for (const auto& [expert, times] : read) {
    CHECK_EQ(expert.first, layer);
    CHECK(std::binary_search(ids.begin(), ids.end(), expert.second));
    CHECK_EQ(times, 1);
  }
}

}  // namespace

TEST("random passes keep every promise") {
  for (uint64_t seed = 0; seed < 24; ++seed) {
    std::mt19937_64 random(seed);
    const ExpertFiles files(specs(random), seed);
    ReadLog log(files.source);
    const uint64_t total = files.total_bytes(), largest = files.largest_bytes();
    const auto budget = [&] {
      const uint64_t n = random() % 4;
      return n == 0 ? largest : n == 1 ? total : largest + random() % (total - largest);
    };
    const uint64_t failures = random() % 2 ? 0 : 40;  // one read in so many, 0 for none
    const uint64_t delays = random() % 3 ? 3 : 0;
    std::atomic<uint64_t> reads{0};
    ScopedReadHook hook([&](const std::string& file, uint64_t offset, uint64_t) -> int {
      const uint64_t n = ++reads * 0x9E3779B97F4A7C15u >> 32;
      if (n % 13 == 1) return EINTR;  // before it is logged: it reads nothing
      log.record(file, offset);
      if (delays && n % delays == 0) std::this_thread::sleep_for(std::chrono::microseconds(n % 700));
      return failures && n % failures == 0 ? EIO : 0;
    });
    ExpertMemory memory(files.source, {budget(), static_cast<uint32_t>(1 + random() % 4), random() % 4 != 0});
    Totals totals;
    for (int pass = 0; pass < 30; ++pass) {
      if (random() % 8 == 0) memory.resize(budget());
      random_layer(random, memory, files, log, totals);
    }
    if (!failures) CHECK_EQ(totals.failures, 0u);
    CHECK(memory.resident_experts() <= memory.total_experts());
    if (check::failures()) {
      std::fprintf(stderr, "seed %lu\n", static_cast<unsigned long>(seed));
      return;
    }
  }
}

TEST("while a layer fits, hits and loads are exactly those of least recently used over bytes") {
  for (uint64_t seed = 100; seed < 110; ++seed) {
    std::mt19937_64 random(seed);
    const ExpertFiles files(specs(random), seed);
    uint64_t most = 0;
    for (const LayerExperts& layer : files.source.layers) {
      most = std::max(most, layer.num_experts * record_bytes(layer));
    }
    const uint64_t budget = most + random() % (files.total_bytes() - most);
    ExpertMemory memory(files.source, {budget, static_cast<uint32_t>(1 + random() % 3), true});

    std::list<std::pair<uint32_t, uint32_t>> resident;  // (layer, expert), oldest first
    uint64_t used = 0, hits = 0, loads = 0, evictions = 0;
    for (int pass = 0; pass < 40; ++pass) {
      const uint32_t layer = random() % files.source.layers.size();
      const Ids ids = random_ids(random, files.source.layers[layer].num_experts);
      // The layer's own experts are the most recent ones, in storage order, and stay: it fits.
      std::list<std::pair<uint32_t, uint32_t>> routed;
      for (uint32_t e : ids) {
        const auto at = std::find(resident.begin(), resident.end(), std::pair(layer, e));
        if (at == resident.end()) {
          ++loads;
          used += record_bytes(files.source.layers[layer]);
        } else {
          ++hits;
          resident.erase(at);
        }
        routed.emplace_back(layer, e);
      }
      for (; used > budget; resident.pop_front(), ++evictions) {
        used -= record_bytes(files.source.layers[resident.front().first]);
      }
      resident.splice(resident.end(), routed);
      run_layer(memory, files, layer, ids, random() % 2, 1 + random() % 5);
      CHECK_EQ(memory.counters().hits, hits);
      CHECK_EQ(memory.counters().loads, loads);
      CHECK_EQ(memory.counters().evictions, evictions);
      CHECK_EQ(memory.resident_experts(), resident.size());
      CHECK_EQ(memory.counters().bytes_unused, 0u);
    }
  }
}
