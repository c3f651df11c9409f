// Streamed passes: random pipelines, arenas, routes, delays, failures and cancellations, against what must always hold
// (docs/prefill.md), and the simulator, told what happened, against the memory.
#include <atomic>
#include <chrono>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <thread>

#include "check.h"
#include "expert_files.h"
#include "experts/simulator.h"

using namespace headrace;

namespace {

using Ids = std::vector<uint32_t>;
using Place = std::pair<uint32_t, uint32_t>;  // layer, expert

// Which expert a read belongs to, and when it started: extents share no 4 KiB block.
class Reads {
 public:
  explicit Reads(const ExpertSource& source) {
    for (uint32_t f = 0; f < source.files.size(); ++f) file_index_[source.files[f]] = f;
    for (uint32_t l = 0; l < source.layers.size(); ++l) {
      const LayerExperts& layer = source.layers[l];
      for (uint32_t i = 0; i < layer.records.size(); ++i) add(layer.records[i], {l, i});
      for (uint32_t i = 0; i < layer.rows.size(); ++i) add(layer.rows[i], {l, i / 3});
    }
  }
  // Returns the expert; counts how often each of its places is read.
  Place note(const std::string& file, uint64_t offset) {
    std::lock_guard lock(mutex_);
    const Place place = std::prev(starts_.upper_bound({file_index_.at(file), offset}))->second;
    int& most = most_[place];
    most = std::max(most, ++times_[{file_index_.at(file), offset}]);
    return place;
  }
  std::map<Place, int> take() {
    std::lock_guard lock(mutex_);
    times_.clear();
    return std::exchange(most_, {});
  }

 private:
  void add(const ExpertExtent& extent, Place place) { starts_[{extent.file, extent.offset / kPage * kPage}] = place; }
  std::mutex mutex_;
  std::map<std::string, uint32_t> file_index_;
  std::map<std::pair<uint32_t, uint64_t>, Place> starts_;
  std::map<std::pair<uint32_t, uint64_t>, int> times_;
  std::map<Place, int> most_;
};

struct EndStream {
  ExpertMemory& memory;
  ~EndStream() { memory.end_stream(); }
};
struct EndLayer {
  ExpertMemory& memory;
  ~EndLayer() { memory.end(); }
};

std::vector<LayerSpec> specs(std::mt19937_64& random) {
  std::vector<LayerSpec> all;
  const bool mixed = random() % 2;
  for (uint32_t l = 0; l < 2 + random() % 4; ++l) {
    const uint32_t rows = mixed && l % 2 ? 64 : 32;
    all.push_back(layer_spec(DType::kQ4_0, rows, 96, 1 + static_cast<uint32_t>(random() % 17), random() % 3 != 0));
  }
  return all;
}

Ids some_of(std::mt19937_64& random, uint32_t n) {
  const uint64_t share = 1 + random() % 8;
  Ids ids;
  for (uint32_t e = 0; e < n; ++e) {
    if (random() % 8 < share) ids.push_back(e);
  }
  if (ids.empty()) ids.push_back(static_cast<uint32_t>(random() % n));
  return ids;
}

}  // namespace

TEST("streamed passes keep every promise, and the simulator counts what they counted") {
  uint64_t num_failures = 0, num_cancelled = 0, num_late = 0, num_unused = 0;
  for (uint64_t seed = 0; seed < 60; ++seed) {
    std::mt19937_64 random(seed);
    const ExpertFiles files(specs(random), seed);
    const uint32_t num_layers = static_cast<uint32_t>(files.source.layers.size());
    const uint64_t total = files.total_bytes(), largest = files.largest_bytes();
    const auto budget = [&] { return random() % 4 ? largest + random() % (total - largest + 1) : largest; };
    const bool may_fail = seed % 3 == 0;  // then what happened cannot be replayed
    Reads reads(files.source);
    std::mutex mutex;
    uint32_t known_layer = 0;  // layers below it were begun in the pass
    std::vector<std::set<uint32_t>> routed(num_layers);
    std::atomic<uint64_t> count{0}, early_after{0};
    std::atomic<bool> is_slow{false};
    ScopedReadHook hook([&](const std::string& file, uint64_t offset, uint64_t) -> int {
      const uint64_t n = ++count * 0x9E3779B97F4A7C15u >> 32;
      const Place place = reads.note(file, offset);
      {
        std::lock_guard lock(mutex);
        if (place.first < known_layer && !routed[place.first].count(place.second)) ++early_after;
      }
      if (is_slow) std::this_thread::sleep_for(std::chrono::milliseconds(12));  // so that waiting asks whether to stop
      if (n % 3 == 0) std::this_thread::sleep_for(std::chrono::microseconds(n % 500));
      return may_fail && n % 60 == 0 ? EIO : n % 7 == 0 ? -1 : 0;  // -1: half of what was asked for
    });
    ExpertMemory memory(files.source, {budget(), static_cast<uint32_t>(1 + random() % 5), true});
    memory.record_events();
    SimulatorOptions settings;
    for (uint32_t l = 0; l < num_layers; ++l) {
      const LayerExperts& layer = files.source.layers[l];
      settings.layers.push_back({layer.num_experts, record_bytes(layer)});
      for (const uint64_t bytes : memory.read_bytes(l)) settings.read_bytes.push_back(bytes);
    }
    settings.capacity_bytes = largest;
    settings.window = UINT32_MAX;
    Simulator simulator(settings);
    bool is_whole = true;

    for (int pass = 0; pass < 6; ++pass) {
      if (random() % 4 == 0) memory.resize(budget());
      const StreamOptions options = {1 + static_cast<uint32_t>(random() % 6), 1 + static_cast<uint32_t>(random() % 4),
                                     1 + static_cast<uint32_t>(random() % 6), random() % 4 != 0};
      std::vector<bool> early(num_layers);
      for (uint32_t l = 0; l < num_layers; ++l) early[l] = random() % 6 != 0;
      const uint64_t stop_after = random() % 8 ? UINT64_MAX : random() % 5;
      is_slow = stop_after < UINT64_MAX;
      uint64_t asked = 0;
      size_t most = 1;
      std::vector<Ids> all;
      for (uint32_t l = 0; l < num_layers; ++l) {
        all.push_back(some_of(random, files.source.layers[l].num_experts));
        most = std::max(most, all.back().size());
      }
      reads.take();
      const ExpertCounters before = memory.counters();
      try {
        memory.begin_stream(options, early, pass % 2 == 0);
        EndStream end_stream{memory};
        for (uint32_t l = 0; l < num_layers; ++l) {
          if (random() % 2) std::this_thread::sleep_for(std::chrono::microseconds(random() % 800));  // attention
          const Ids& ids = all[l];
          {
            std::lock_guard lock(mutex);
            routed[l] = {ids.begin(), ids.end()};
          }
          memory.begin(l, ids, Ids(ids.size(), 1 + l));
          {
            std::lock_guard lock(mutex);
            known_layer = l + 1;  // reads that were handed out before begin() returned may be late to get here
          }
          EndLayer end{memory};
          Ids taken;
          uint32_t next = 0;
          while (memory.take(random() % 2, UINT32_MAX, taken, [&] { return ++asked > stop_after; })) {
            CHECK(!taken.empty());
            const uint32_t group = ids[taken[0]] / options.group_size;
            for (uint32_t i : taken) {
              CHECK_EQ(i, next++);
              CHECK_EQ(ids[i] / options.group_size, group);
              CHECK(files.slot_equals(l, ids[i], memory.address(i)));
            }
            CHECK(memory.committed_bytes() <= memory.arena_bytes());
            for (uint32_t i : taken) memory.release(i);
          }
          CHECK_EQ(next, ids.size());
        }
      } catch (const Cancelled&) {
        is_whole = false;
        ++num_cancelled;
      } catch (const Error& e) {
        CHECK(may_fail && std::strstr(e.what(), "Input/output error"));
        is_whole = false;
        ++num_failures;
      }
      {
        std::lock_guard lock(mutex);
        known_layer = 0;
      }
      const auto read = reads.take();
      if (!may_fail && options.banks > 1) {
        for (const auto& [place, times] : read) CHECK(times == 1 || before.evictions > 0);
      }
      if (!options.reads_early) {
        for (const auto& [place, times] : read) {
          CHECK(std::binary_search(all[place.first].begin(), all[place.first].end(), place.second));
        }
      }
      ExpertCounters now;
      const std::vector<uint32_t> events = memory.take_events(now);
      CHECK(now.bytes_unused <= now.bytes_read);
      if (!options.reads_early) CHECK_EQ(now.prefetches, before.prefetches);
      if (is_whole) {  // the first pass that is not ends the comparison
        std::vector<int32_t> rows(num_layers * most, -1);
        for (uint32_t l = 0; l < num_layers; ++l) std::copy(all[l].begin(), all[l].end(), rows.begin() + l * most);
        simulator.feed(rows.data(), 1, static_cast<uint32_t>(most));
        for (uint32_t l = 0; l < num_layers; ++l) {  // as many routes of each expert as begin() was told
          std::vector<int32_t> again(num_layers * most, -1);
          std::copy(all[l].begin(), all[l].end(), again.begin() + l * most);
          for (uint32_t i = 0; i < l; ++i) simulator.feed(again.data(), 1, static_cast<uint32_t>(most));
        }
        simulator.end_pass(events);
        check_same(simulator.counters(), now);
      }
      num_late += now.late_hits - before.late_hits;
      num_unused += now.bytes_unused - before.bytes_unused;
    }
    CHECK(early_after.load() <= count.load() / 20);  // only reads that were handed out as the routes came
    if (check::failures()) {
      std::fprintf(stderr, "seed %lu\n", static_cast<unsigned long>(seed));
      return;
    }
  }
  CHECK(num_failures > 3 && num_cancelled > 3 && num_late > 100 && num_unused > 0);  // the cases were met
}

TEST("without reading early no expert is read twice in a pass, nor one without a route") {
  const ExpertFiles files({layer_spec(DType::kQ4_0, 32, 96, 12, true), layer_spec(DType::kQ4_0, 32, 96, 12, true)}, 3);
  Reads reads(files.source);
  ScopedReadHook hook([&](const std::string& file, uint64_t offset, uint64_t) {
    reads.note(file, offset);
    return 0;
  });
  for (uint32_t slots : {1u, 2u, 3u, 7u, 24u}) {
    for (const StreamOptions& options : {StreamOptions{1, 1, 1, false}, {3, 2, 4, false}, {12, 1, 2, false}}) {
      ExpertMemory memory(files.source, {slots * files.largest_bytes(), 3, true});
      for (int pass = 0; pass < 3; ++pass) {
        reads.take();
        memory.begin_stream(options, {true, true}, true);
        EndStream end{memory};
        for (uint32_t l : {0u, 1u}) CHECK_EQ(run_layer(memory, files, l, {1, 2, 5, 7, 11}).size(), 5u);
        for (const auto& [place, times] : reads.take()) {
          CHECK_EQ(times, 1);
          CHECK(std::set<uint32_t>({1, 2, 5, 7, 11}).count(place.second));
        }
      }
    }
  }
}

TEST("what stays after a prompt is what it routed to most") {
  const uint32_t experts = 16;
  const ExpertFiles files(
      {layer_spec(DType::kQ4_0, 32, 96, experts, true), layer_spec(DType::kQ4_0, 32, 96, experts, true),
       layer_spec(DType::kQ4_0, 32, 96, experts, true)},
      4);
  ExpertMemory memory(files.source, {20 * files.largest_bytes(), 3, true});
  Ids ids(experts), routes(experts);
  for (uint32_t e = 0; e < experts; ++e) ids[e] = e;
  memory.begin_stream({2, 2, 4, true}, {true, true, true}, true);
  for (uint32_t l = 0; l < 3; ++l) {
    for (uint32_t e = 0; e < experts; ++e) routes[e] = e % 4 == 0 ? 100 + e + l : 1 + e % 4;
    memory.begin(l, ids, routes);
    Ids taken;
    while (memory.take(true, UINT32_MAX, taken, nullptr)) {
      for (uint32_t i : taken) memory.release(i);
    }
    memory.end();
  }
  memory.end_stream();
  // Eight slots were banks; the twelve others keep the four hot experts of each layer.
  const uint64_t loads = memory.counters().loads;
  for (uint32_t l = 0; l < 3; ++l) run_layer(memory, files, l, {0, 4, 8, 12});
  CHECK_EQ(memory.counters().loads, loads);
}

TEST("prefetches of an oracle that errs: right bytes, every use counted, and the simulator counts the same") {
  uint64_t num_late = 0, num_prefetched = 0;
  for (uint64_t seed = 0; seed < 24; ++seed) {
    std::mt19937_64 random(seed);
    const ExpertFiles files(specs(random), seed);
    const uint32_t num_layers = static_cast<uint32_t>(files.source.layers.size());
    const uint64_t total = files.total_bytes(), largest = files.largest_bytes();
    const auto budget = [&] { return random() % 4 ? largest + random() % (total - largest + 1) : largest; };
    std::atomic<uint64_t> count{0};
    ScopedReadHook hook([&](const std::string&, uint64_t, uint64_t) {
      const uint64_t n = ++count * 0x9E3779B97F4A7C15u >> 32;
      if (n % 2 == 0) std::this_thread::sleep_for(std::chrono::microseconds(n % 400));
      return 0;
    });
    ExpertMemoryOptions options{budget(), static_cast<uint32_t>(1 + random() % 4), true};
    options.policy.name = policy_names()[seed % 5];
    options.oracle_recall = static_cast<double>(random() % 5) / 4;
    options.oracle_seed = seed;
    ExpertMemory memory(files.source, options);
    memory.record_events();
    SimulatorOptions settings;
    for (uint32_t l = 0; l < num_layers; ++l) {
      settings.layers.push_back({files.source.layers[l].num_experts, record_bytes(files.source.layers[l])});
      for (const uint64_t bytes : memory.read_bytes(l)) settings.read_bytes.push_back(bytes);
    }
    settings.capacity_bytes = largest;
    settings.window = UINT32_MAX;
    settings.policy = options.policy;
    Simulator simulator(settings);

    std::vector<std::vector<Ids>> passes(12);
    size_t most = 1;
    uint64_t uses = 0;
    for (auto& pass : passes) {
      for (const LayerExperts& layer : files.source.layers) {
        pass.push_back(random() % 10 ? some_of(random, layer.num_experts) : Ids());
        most = std::max(most, pass.back().size());
      }
    }
    const auto announce = [&](size_t p) {
      for (uint32_t l = 0; p < passes.size() && l < num_layers; ++l) memory.expect(l, passes[p][l]);
    };
    announce(0);
    for (size_t p = 0; p < passes.size(); ++p) {
      announce(p + 1);
      if (random() % 5 == 0) memory.resize(budget());
      std::vector<int32_t> rows(num_layers * most, -1);
      const bool is_streamed = random() % 4 == 0;
      if (is_streamed) memory.begin_stream({2, 2, 2, true}, std::vector<bool>(num_layers, true), true);
      for (uint32_t l = 0; l < num_layers; ++l) {
        if (passes[p][l].empty()) continue;
        CHECK_EQ(run_layer(memory, files, l, passes[p][l], random() % 2).size(), passes[p][l].size());
        CHECK(memory.committed_bytes() <= memory.arena_bytes());
        uses += passes[p][l].size();
        std::copy(passes[p][l].begin(), passes[p][l].end(), rows.begin() + l * most);
      }
      if (is_streamed) memory.end_stream();
      ExpertCounters now;
      const std::vector<uint32_t> events = memory.take_events(now);
      CHECK_EQ(now.hits + now.late_hits + now.loads, uses);
      simulator.feed(rows.data(), 1, static_cast<uint32_t>(most));
      simulator.end_pass(events);
      check_same(simulator.counters(), now);
      num_late += now.late_hits;
      num_prefetched += now.prefetches;
    }
    if (check::failures()) {
      std::fprintf(stderr, "seed %lu\n", static_cast<unsigned long>(seed));
      return;
    }
  }
  CHECK(num_late > 0 && num_prefetched > 100);
}

TEST("a guess that fails is read again when it is wanted, and forgotten when it is not") {
  const ExpertFiles files({layer_spec(DType::kQ4_0, 32, 96, 4, true), layer_spec(DType::kQ4_0, 32, 96, 4, true)}, 5);
  const ExpertExtent second = files.source.layers[1].records[0];
  std::atomic<int> failures{1};
  ScopedReadHook hook([&](const std::string&, uint64_t offset, uint64_t) {
    return offset == second.offset && failures-- > 0 ? EIO : 0;
  });
  for (bool is_wanted : {true, false}) {
    failures = 1;
    ExpertMemory memory(files.source, {files.total_bytes(), 2, true});
    memory.begin_stream({2, 2, 4, true}, {true, true}, true);
    EndStream end{memory};
    run_layer(memory, files, 0, {0, 1, 2, 3});
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    const Ids ids = is_wanted ? Ids{0, 3} : Ids{2, 3};
    CHECK(run_layer(memory, files, 1, ids, true) == ids);
    CHECK(failures <= 0);
  }
}

TEST("a pass that is given up in a layer starts no more reads") {
  const ExpertFiles files({layer_spec(DType::kQ4_0, 32, 96, 4, true), layer_spec(DType::kQ4_0, 32, 96, 4, true)}, 6);
  ExpertMemory memory(files.source, {files.total_bytes(), 2, true});
  const Ids all{0, 1, 2, 3};
  {
    // The only bank is the first expert's until it is used, so nothing is read early before end().
    memory.begin_stream({1, 1, 1, true}, {false, true}, true);
    EndStream end{memory};
    memory.begin(0, all);
    memory.end();
    CHECK_EQ(memory.counters().prefetches, 0u);
  }
  memory.begin_stream({1, 1, 1, true}, {false, true}, true);
  EndStream end{memory};
  for (uint32_t l : {0u, 1u}) CHECK(run_layer(memory, files, l, all, true) == all);
}
