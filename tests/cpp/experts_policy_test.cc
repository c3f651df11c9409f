// Policies, the queue of victims, and residency's rules, each against a plain reference.
#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <thread>

#include "check.h"
#include "expert_files.h"
#include "experts/residency.h"
#include "experts/simulator.h"
#include "experts/victims.h"

using namespace headrace;

namespace {

using Ids = std::vector<uint32_t>;
using Pass = std::vector<Ids>;  // [layer], ascending

std::vector<LayerShape> uniform(uint32_t layers, uint32_t experts) {
  return std::vector<LayerShape>(layers, {experts, 1});
}

std::vector<Pass> random_trace(std::mt19937_64& random, const std::vector<LayerShape>& layers, uint32_t num_passes,
                               uint32_t most) {
  std::vector<Pass> passes(num_passes);
  for (Pass& pass : passes) {
    for (const LayerShape& layer : layers) {
      std::set<uint32_t> ids;
      const uint32_t n = 1 + random() % std::min(most, layer.num_experts);
      while (ids.size() < n) ids.insert(random() % layer.num_experts);
      pass.emplace_back(ids.begin(), ids.end());
    }
  }
  return passes;
}

SimulatorOptions settings(const std::vector<LayerShape>& layers, uint64_t capacity, const std::string& policy) {
  SimulatorOptions options;
  options.layers = layers;
  options.capacity_bytes = capacity;
  options.policy = {policy, 20};
  options.lookahead = policy == "belady" ? 1000 : 0;
  return options;
}

// capacities: of each pass, if they differ from what the options say.
SimulatedCounters simulate(const SimulatorOptions& options, const std::vector<Pass>& passes,
                           const std::vector<uint64_t>& capacities = {}) {
  Simulator simulator(options);
  for (size_t p = 0; p < passes.size(); ++p) {
    const Pass& pass = passes[p];
    if (!capacities.empty()) simulator.resize(capacities[p]);
    size_t most = 1;
    for (const Ids& ids : pass) most = std::max(most, ids.size());
    std::vector<int32_t> row(pass.size() * most, -1);
    for (size_t l = 0; l < pass.size(); ++l) std::copy(pass[l].begin(), pass[l].end(), row.begin() + l * most);
    simulator.feed(row.data(), 1, static_cast<uint32_t>(most));
    simulator.end_pass();
  }
  simulator.finish();
  return simulator.counters();
}

// The fewest loads that any choice of victims reaches under the rules of docs/policies.md, by trying all of them.
// Experts are numbered through; sets of them are bits.
class FewestLoads {
 public:
  FewestLoads(const std::vector<Pass>& passes, uint32_t experts_per_layer, uint32_t slots, bool pins) : slots_(slots) {
    for (const Pass& pass : passes) {
      for (uint32_t l = 0; l < pass.size(); ++l) {
        Ids all;
        for (uint32_t id : pass[l]) all.push_back(l * experts_per_layer + id);
        if (pins) {
          requests_.push_back(all);
        } else {
          for (uint32_t e : all) requests_.push_back({e});
        }
      }
    }
  }

  uint32_t find() { return from(0, 0); }

 private:
  uint32_t from(size_t at, uint32_t resident) {
    if (at == requests_.size()) return 0;
    const auto known = best_.find({at, resident});
    if (known != best_.end()) return known->second;
    uint32_t needed = 0;
    for (uint32_t e : requests_[at]) needed |= 1u << e;
    uint32_t fewest = UINT32_MAX;
    if (requests_[at].size() <= slots_) {  // what it needs stays; any of the others may go, no more than must
      const uint32_t loads = std::popcount(needed & ~resident);
      const uint32_t others = resident & ~needed;
      const uint32_t room = slots_ - std::popcount(needed);
      for (uint32_t kept = others;; kept = (kept - 1) & others) {
        if (std::popcount(kept) == static_cast<int>(std::min<uint32_t>(room, std::popcount(others)))) {
          fewest = std::min(fewest, loads + from(at + 1, needed | kept));
        }
        if (kept == 0) break;
      }
    } else {  // its last ones stay, whatever the policy; all slots held by hits behind the first: one of them goes
      uint32_t stay = 0;
      for (size_t i = requests_[at].size() - slots_; i < requests_[at].size(); ++i) stay |= 1u << requests_[at][i];
      uint32_t loads = std::popcount(needed & ~resident);
      const bool first_is_missing = !(resident >> requests_[at][0] & 1);
      if (first_is_missing && std::popcount(resident & needed) == static_cast<int>(slots_)) ++loads;
      fewest = loads + from(at + 1, stay);
    }
    best_[{at, resident}] = fewest;
    return fewest;
  }

  const uint32_t slots_;
  std::vector<Ids> requests_;
  std::map<std::pair<size_t, uint32_t>, uint32_t> best_;
};

// One layer of a pass whose loads land at once; `during`: while it is in progress, everything used.
void run_pure(Residency& residency, uint32_t layer, const Ids& ids, const std::function<void()>& during = nullptr) {
  residency.observe(layer, ids);
  residency.begin(layer, ids, {});
  const auto load = [&] {
    for (uint32_t i = residency.next_load(); i != Residency::kNone; i = residency.next_load()) {
      residency.landed(residency.entries()[i].expert);
    }
  };
  load();
  for (uint32_t i = 0; i < ids.size(); ++i) {
    if (residency.entries()[i].status == Residency::Status::kLoading) residency.landed(residency.entries()[i].expert);
    residency.take(i);
    residency.release(i);
    load();
  }
  if (during) during();
  residency.end();
}

}  // namespace

TEST("the first victim is the least of those present, spared ones last") {
  std::mt19937_64 random(3);
  constexpr uint32_t kExperts = 40;
  Victims victims(kExperts);
  std::map<uint32_t, std::tuple<bool, uint64_t, uint64_t, uint32_t>> model;
  for (int step = 0; step < 30000; ++step) {
    const uint32_t e = random() % kExperts;
    if (random() % 3 == 0) {
      victims.remove(e);
      model.erase(e);
    } else {
      const Policy::Key key{random() % 5, random() % 3};
      const bool is_spared = random() % 4 == 0;
      victims.put(e, key, is_spared);
      model[e] = {is_spared, key.first, key.second, e};
    }
    CHECK_EQ(victims.empty(), model.empty());
    CHECK_EQ(victims.contains(e), model.contains(e));
    if (model.empty()) continue;
    const auto least =
        std::min_element(model.begin(), model.end(), [](auto& a, auto& b) { return a.second < b.second; });
    CHECK_EQ(victims.first(), least->first);
    CHECK_EQ(victims.is_spared(victims.first()), std::get<0>(least->second));
  }
}

TEST("belady loads as few as any choice of victims, with pins and without, and no policy fewer") {
  for (uint64_t seed = 0; seed < 150; ++seed) {
    std::mt19937_64 random(seed);
    const uint32_t layers = 1 + random() % 3, experts = 2 + random() % 4;
    const auto shapes = uniform(layers, experts);
    const auto passes = random_trace(random, shapes, 3 + random() % 5, 1 + random() % experts);
    for (uint32_t slots = 1; slots <= layers * experts; slots += 1 + random() % 2) {
      for (bool pins : {true, false}) {
        const uint32_t fewest = FewestLoads(passes, experts, slots, pins).find();
        for (const std::string& policy : policy_names()) {
          SimulatorOptions options = settings(shapes, slots, policy);
          options.pins = pins;
          const uint64_t loads = simulate(options, passes).loads;
          if (policy == "belady") CHECK_EQ(loads, fewest);
          CHECK(loads >= fewest);
        }
        if (check::failures()) {
          std::fprintf(stderr, "seed %lu, %u slots, pins %d\n", static_cast<unsigned long>(seed), slots, pins);
          return;
        }
      }
    }
  }
}

TEST("every policy on every edge: one slot, all slots, fewer than a layer needs, one layer, all experts routed") {
  std::mt19937_64 random(7);
  struct Case {
    uint32_t layers, experts, most;
    uint64_t slots;
  };
  for (const Case c : {Case{3, 6, 3, 1}, {3, 6, 3, 18}, {3, 6, 6, 4}, {1, 6, 3, 4}, {1, 1, 1, 1}, {2, 5, 5, 5}}) {
    const auto shapes = uniform(c.layers, c.experts);
    auto passes = random_trace(random, shapes, 40, c.most);
    if (c.most == c.experts && c.slots == 5) {
      for (Pass& pass : passes) {
        for (Ids& ids : pass) {
          ids.resize(c.experts);
          std::iota(ids.begin(), ids.end(), 0);
        }
      }
    }
    std::set<std::pair<uint32_t, uint32_t>> distinct;
    uint64_t uses = 0;
    for (const Pass& pass : passes) {
      for (uint32_t l = 0; l < c.layers; ++l) {
        uses += pass[l].size();
        for (uint32_t id : pass[l]) distinct.emplace(l, id);
      }
    }
    for (const std::string& policy : policy_names()) {
      for (double transfers : {0.0, 0.3, 2.0}) {
        for (bool pins : {true, false}) {
          SimulatorOptions options = settings(shapes, c.slots, policy);
          options.pins = pins;
          options.prefetch = {transfers, 0.7, 5};
          const SimulatedCounters s = simulate(options, passes);
          CHECK_EQ(s.passes, passes.size());
          CHECK_EQ(s.hits + s.late_hits + s.loads, uses);
          CHECK_EQ(s.bytes_read, s.loads + s.prefetches);
          CHECK(s.prefetches_unused <= s.prefetches);
          CHECK(s.loads + s.prefetches - s.evictions <= c.slots);
          if (transfers == 0) CHECK_EQ(s.prefetches + s.late_hits + s.prefetches_unused, 0u);
          if (c.slots == uint64_t{c.layers} * c.experts) {
            CHECK_EQ(s.evictions, 0u);
            CHECK(s.loads + s.prefetches >= distinct.size());
            if (transfers == 0) CHECK_EQ(s.loads, distinct.size());
          }
        }
      }
    }
  }
}

TEST("a layer that does not fit keeps its last experts, whatever the policy and the order of releases") {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    std::mt19937_64 random(seed);
    const uint32_t experts = 2 + random() % 8;
    const std::vector<LayerShape> shapes = {{experts, 2}, {experts, 3}};
    const uint64_t capacity = 3 + random() % (4 * experts);
    std::set<uint32_t> evicted;
    Residency residency(shapes, capacity, {policy_names()[random() % policy_names().size()], 10},
                        [&](uint32_t e, bool) { evicted.insert(e); });
    for (int pass = 0; pass < 6; ++pass) {
      const uint32_t layer = random() % 2;
      Ids ids;
      for (uint32_t e = 0; e < experts; ++e) {
        if (random() % 3) ids.push_back(e);
      }
      const uint64_t room = capacity / shapes[layer].record_bytes;
      residency.observe(layer, ids);
      residency.begin(layer, ids, {});
      Ids loading;
      uint32_t num_taken = 0;
      const auto load = [&] {
        for (uint32_t i = residency.next_load(); i != Residency::kNone; i = residency.next_load()) {
          CHECK(residency.used_bytes() <= capacity);
          loading.push_back(i);
        }
      };
      load();
      while (num_taken < ids.size()) {  // reads end, and experts are used, in any order
        if (!loading.empty() && random() % 2) {
          std::swap(loading[random() % loading.size()], loading.back());
          residency.landed(residency.entries()[loading.back()].expert);
          loading.pop_back();
        }
        Ids ready;
        for (uint32_t i = 0; i < ids.size(); ++i) {
          if (residency.entries()[i].status == Residency::Status::kReady) ready.push_back(i);
        }
        CHECK(!ready.empty() || !loading.empty());
        if (ready.empty()) continue;
        const uint32_t i = ready[random() % ready.size()];
        residency.take(i);
        residency.release(i);
        ++num_taken;
        load();
      }
      residency.end();
      for (size_t i = 0; i < ids.size(); ++i) {
        const bool stays = ids.size() - i <= room;
        CHECK_EQ(residency.state(residency.first_expert(layer) + ids[i]) == Residency::State::kResident, stays);
      }
      if (check::failures()) {
        std::fprintf(stderr, "seed %lu\n", static_cast<unsigned long>(seed));
        return;
      }
    }
  }
}

TEST("a prefetch leaves what the layer in progress needs, what is protected, and room for a load") {
  const auto shapes = uniform(2, 8);
  std::set<uint32_t> evicted;
  Residency residency(shapes, 4, {"lru", 0}, [&](uint32_t e, bool) { evicted.insert(e); });
  const auto nothing = [](uint32_t) { return false; };
  run_pure(residency, 0, {0, 1});
  run_pure(residency, 1, {0, 1}, [&] {       // 8 and 9, both pinned; 0 and 1 of layer 0 are older
    CHECK(!residency.prefetch(8, nothing));  // resident
    CHECK(!residency.prefetch(2, [](uint32_t e) { return e < 2; }));
    CHECK(evicted.empty());
    CHECK(residency.prefetch(2, [](uint32_t e) { return e == 0; }));
    CHECK(evicted == std::set<uint32_t>{1});
    CHECK(residency.prefetch(3, nothing));
    CHECK(evicted == (std::set<uint32_t>{0, 1}));
    CHECK(!residency.prefetch(4, nothing));  // all others are needed or on their way
  });
  // 2 and 3 are on their way: a layer of three finds two slots, and runs.
  run_pure(residency, 1, {2, 3, 4});
  CHECK_EQ(residency.counters().loads, 7u);
  CHECK(residency.state(12) == Residency::State::kResident && residency.state(10) == Residency::State::kAbsent);
  CHECK(residency.prefetch(0, nothing));  // three on their way at most: one slot is left for a load
  CHECK(!residency.prefetch(1, nothing));
  residency.landed(0);
  residency.landed(3);
  run_pure(residency, 0, {2});  // was on its way: a late hit
  CHECK_EQ(residency.counters().late_hits, 1u);
  CHECK_EQ(residency.counters().prefetches, 3u);
  // Guesses of layer 0 whose pass has come are victims like others now.
  run_pure(residency, 0, {3});
  CHECK_EQ(residency.counters().hits, 1u);
}

TEST("a prefetch that was not used yet goes after all others") {
  const auto shapes = uniform(2, 4);
  std::vector<uint32_t> evicted;
  Residency residency(shapes, 3, {"lru", 0}, [&](uint32_t e, bool was_taken) {
    if (!was_taken) evicted.push_back(e);
  });
  CHECK(residency.prefetch(0, nullptr));
  residency.landed(0);
  run_pure(residency, 1, {0, 1});
  run_pure(residency, 1, {2, 3});
  CHECK(residency.state(0) == Residency::State::kResident);
  run_pure(residency, 1, {0, 1, 2});  // it stands in the way of a layer
  CHECK(evicted == std::vector<uint32_t>{0});
}

TEST("belady refuses other routes than were announced") {
  Residency residency(uniform(1, 4), 2, {"belady", 0}, [](uint32_t, bool) {});
  residency.expect(0, Ids{0, 1});
  CHECK_THROWS(Error, "layer 0 are not those that were announced", residency.observe(0, Ids{0, 2}));
  CHECK_THROWS(Error, "layer 0 are not those that were announced", residency.observe(0, Ids{0}));
  residency.observe(0, Ids{0, 1});
  CHECK_THROWS(Error, "expected one of lru, lfu", make_policy({"fifo", 0}, uniform(1, 1)));
}

TEST("the engine's counters are those of the simulator, whatever the policy, the budget, the order and the delays") {
  for (uint64_t seed = 0; seed < 48; ++seed) {
    std::mt19937_64 random(seed);
    std::vector<LayerSpec> specs;
    for (uint32_t l = 0; l < 3; ++l) specs.push_back(layer_spec(DType::kQ4_0, 32u << random() % 2, 64, 8, true));
    const ExpertFiles files(specs, seed);
    std::vector<LayerShape> shapes;
    for (const LayerExperts& layer : files.source.layers) shapes.push_back({layer.num_experts, record_bytes(layer)});
    const auto passes = random_trace(random, shapes, 30, 8);
    const std::string policy = policy_names()[seed % policy_names().size()];
    const uint64_t budget = seed / 6 % 4 == 0   ? files.largest_bytes()
                            : seed / 6 % 4 == 1 ? files.total_bytes()
                                                : files.largest_bytes() * (2 + random() % 10);
    std::atomic<uint64_t> reads{0};
    ScopedReadHook hook([&](const std::string&, uint64_t, uint64_t) {
      const uint64_t n = ++reads * 0x9E3779B97F4A7C15u >> 32;
      if (n % 3 == 0) std::this_thread::sleep_for(std::chrono::microseconds(n % 900));
      return 0;
    });
    const SimulatorOptions options = settings(shapes, budget, policy);
    std::vector<uint64_t> budgets(passes.size(), budget);  // in every other run the guard moves it now and then
    for (size_t p = 1; p < passes.size() && seed >= 24; ++p) {
      budgets[p] = random() % 4 ? budgets[p - 1] : files.largest_bytes() * (1 + random() % 12);
    }
    const SimulatedCounters s = simulate(options, passes, budgets);
    ExpertMemoryOptions memory_options{budget, static_cast<uint32_t>(1 + random() % 4), true};
    memory_options.policy = options.policy;
    ExpertMemory memory(files.source, memory_options);
    if (policy == "belady") {
      for (const Pass& pass : passes) {
        for (uint32_t l = 0; l < pass.size(); ++l) memory.expect(l, pass[l]);
      }
    }
    for (size_t p = 0; p < passes.size(); ++p) {
      memory.resize(budgets[p]);
      for (uint32_t l = 0; l < passes[p].size(); ++l) {
        run_layer(memory, files, l, passes[p][l], random() % 2, 1 + random() % 4);
      }
    }
    check_same(s, memory.counters());
    if (check::failures()) {
      std::fprintf(stderr, "seed %lu, %s\n", static_cast<unsigned long>(seed), policy.c_str());
      return;
    }
  }
}
