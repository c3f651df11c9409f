#include "experts/simulator.h"

#include <algorithm>
#include <string>
#include <utility>

#include "support/error.h"

namespace headrace {

namespace {

constexpr uint32_t kNone = Residency::kNone;

void check_capacity(const std::vector<LayerShape>& layers, uint64_t capacity_bytes) {
  uint64_t largest = 0;
  for (const LayerShape& layer : layers) largest = std::max(largest, layer.record_bytes);
  if (capacity_bytes >= largest) return;
  throw Error("simulator: expected room for the largest expert's " + std::to_string(largest) + " bytes, found " +
              std::to_string(capacity_bytes));
}

SimulatorOptions checked(SimulatorOptions options) {
  for (const LayerShape& layer : options.layers) {
    if (layer.num_experts == 0 || layer.record_bytes == 0) throw Error("simulator: a layer without experts or bytes");
  }
  const auto expect = [](bool holds, const std::string& what, const std::string& found) {
    if (!holds) throw Error("simulator: expected " + what + ", found " + found);
  };
  expect(!options.layers.empty(), "at least one layer", "none");
  check_capacity(options.layers, options.capacity_bytes);
  expect(options.window >= 1, "a window of at least 1 token", "0");
  size_t num_experts = 0;
  for (const LayerShape& layer : options.layers) num_experts += layer.num_experts;
  expect(options.read_bytes.empty() || options.read_bytes.size() == num_experts,
         "what reading each of " + std::to_string(num_experts) + " experts takes",
         std::to_string(options.read_bytes.size()) + " sizes");
  const SimulatedPrefetch& p = options.prefetch;
  expect(p.transfers_per_layer >= 0 && p.transfers_per_layer <= 1e6, "0 to 1e6 transfers a layer",
         std::to_string(p.transfers_per_layer));
  expect(p.recall >= 0 && p.recall <= 1, "a recall of 0 to 1", std::to_string(p.recall));
  if (p.transfers_per_layer > 0) options.lookahead = std::max(options.lookahead, 1u);
  return options;
}

}  // namespace

Simulator::Simulator(SimulatorOptions options)
    : options_(checked(std::move(options))),
      residency_(options_.layers, options_.capacity_bytes, options_.policy,
                 [this](uint32_t expert, bool was_taken) {
                   if (was_taken) return;
                   ++prefetches_unused_;
                   bytes_unused_ += read_bytes(expert);
                 }),
      capacity_bytes_(options_.capacity_bytes),
      routes_(residency_.num_experts(), 0),
      used_(options_.layers.size()),
      forecasts_(options_.layers.size()),
      is_forecast_(residency_.num_experts(), false),
      random_(options_.prefetch.seed) {
  std::vector<uint64_t> record_bytes;
  for (uint32_t l = 0; l < options_.layers.size(); ++l) {
    layer_of_.insert(layer_of_.end(), options_.layers[l].num_experts, l);
    record_bytes.push_back(options_.layers[l].record_bytes);
  }
  for (const LinkOptions& link : options_.links) bounds_.emplace_back(record_bytes, link);
}

void Simulator::feed(const int32_t* ids, uint64_t num_tokens, uint32_t top_k) {
  for (uint64_t t = 0; t < num_tokens; ++t) {
    for (uint32_t l = 0; l < options_.layers.size(); ++l) {
      const uint32_t n = options_.layers[l].num_experts, first = residency_.first_expert(l);
      for (uint32_t k = 0; k < top_k; ++k) {
        const int32_t id = *ids++;
        if (id < 0) continue;
        if (static_cast<uint32_t>(id) >= n) {
          throw Error("simulator: token " + std::to_string(num_tokens_) + " layer " + std::to_string(l) +
                      ": expected an expert below " + std::to_string(n) + ", found " + std::to_string(id));
        }
        if (routes_[first + id]++ == 0) used_[l].push_back(id);
      }
    }
    ++num_tokens_;
    if (++tokens_in_pass_ == options_.window) end_pass();
  }
}

void Simulator::end_pass() {
  if (tokens_in_pass_ == 0) return;
  tokens_in_pass_ = 0;
  Pass pass;
  pass.capacity_bytes = capacity_bytes_;
  pass.first.push_back(0);
  for (uint32_t l = 0; l < used_.size(); ++l) {
    std::sort(used_[l].begin(), used_[l].end());
    for (const uint32_t id : used_[l]) {
      pass.ids.push_back(id);
      uint32_t& routes = routes_[residency_.first_expert(l) + id];
      pass.num_routes.push_back(routes);
      routes = 0;
    }
    if (options_.lookahead > 0) residency_.expect(l, used_[l]);
    pass.first.push_back(static_cast<uint32_t>(pass.ids.size()));
    used_[l].clear();
  }
  pending_.push_back(std::move(pass));
  run_pending(options_.lookahead);
}

void Simulator::run_pending(size_t kept) {
  while (pending_.size() > kept) {
    const Pass next = std::move(pending_.front());
    pending_.pop_front();
    run_pass(next);
  }
}

void Simulator::resize(uint64_t capacity_bytes) {
  check_capacity(options_.layers, capacity_bytes);
  capacity_bytes_ = capacity_bytes;
}

void Simulator::finish() {
  end_pass();
  run_pending(0);
  for (ScheduleBound& bound : bounds_) bound.finish();
}

void Simulator::run_pass(const Pass& pass) {
  if (pass.capacity_bytes != residency_.capacity_bytes()) {
    if (in_flight_ != kNone) residency_.landed(std::exchange(in_flight_, kNone));
    residency_.resize(pass.capacity_bytes);
  }
  const uint64_t before = residency_.counters().loads;
  for (uint32_t l = 0; l < options_.layers.size(); ++l) {
    const uint32_t n = pass.first[l + 1] - pass.first[l];
    const std::span<const uint32_t> ids(pass.ids.data() + pass.first[l], n);
    const std::span<const uint32_t> num_routes(pass.num_routes.data() + pass.first[l], n);
    const uint64_t loads = residency_.counters().loads;
    if (n > 0) residency_.observe(l, ids);  // an engine passes over a layer that no row goes through
    if (n > 0 && options_.pins) {
      run_layer(l, ids, num_routes, true);
    } else {
      for (uint32_t i = 0; i < n; ++i) run_layer(l, ids.subspan(i, 1), num_routes.subspan(i, 1), i + 1 == n);
    }
    for (ScheduleBound& bound : bounds_) bound.add(n, static_cast<uint32_t>(residency_.counters().loads - loads));
  }
  const uint64_t loads = residency_.counters().loads - before;
  loads_squared_ += loads * loads;
  ++num_passes_;
}

void Simulator::run_layer(uint32_t layer, std::span<const uint32_t> ids, std::span<const uint32_t> num_routes,
                          bool is_last) {
  residency_.begin(layer, ids, num_routes);
  const auto load = [&] {
    for (uint32_t i = residency_.next_load(); i != kNone; i = residency_.next_load()) {
      const uint32_t expert = residency_.entries()[i].expert;
      bytes_read_ += read_bytes(expert);
      residency_.landed(expert);
    }
  };
  load();
  for (uint32_t i = 0; i < ids.size(); ++i) {
    const Residency::Entry& entry = residency_.entries()[i];
    if (entry.status == Residency::Status::kLoading) {  // a late hit: the pass waits for it
      residency_.landed(entry.expert);
      in_flight_ = kNone;
    }
    residency_.take(i);
    residency_.release(i);
    load();
  }
  if (is_last && options_.prefetch.transfers_per_layer > 0) {
    forecast(layer);
    move_prefetches(layer);
  }
  residency_.end();
}

uint64_t Simulator::read_bytes(uint32_t expert) const {
  return options_.read_bytes.empty() ? options_.layers[layer_of_[expert]].record_bytes : options_.read_bytes[expert];
}

// ---- prefetch

// What the layer's next pass needs, as the noisy oracle says when the layer has run.
void Simulator::forecast(uint32_t layer) {
  const uint32_t first = residency_.first_expert(layer), n = options_.layers[layer].num_experts;
  std::vector<uint32_t>& guess = forecasts_[layer];
  for (const uint32_t e : guess) is_forecast_[e] = false;
  guess.clear();
  if (pending_.empty()) return;
  const Pass& pass = pending_.front();
  const uint32_t begin = pass.first[layer], end = pass.first[layer + 1];
  std::vector<bool> is_needed(n, false);
  for (uint32_t i = begin; i < end; ++i) is_needed[pass.ids[i]] = true;
  std::vector<uint32_t> others;
  for (uint32_t id = 0; id < n; ++id) {
    if (!is_needed[id]) others.push_back(first + id);
  }
  const auto chance = [&] { return static_cast<double>(random_() >> 11) * 0x1p-53; };
  for (uint32_t i = begin; i < end; ++i) {
    const uint32_t expert = first + pass.ids[i];
    if (residency_.state(expert) != Residency::State::kAbsent || chance() < options_.prefetch.recall) {
      guess.push_back(expert);
    } else if (!others.empty()) {
      std::swap(others[random_() % others.size()], others.back());
      guess.push_back(others.back());
      others.pop_back();
    }
  }
  for (const uint32_t e : guess) is_forecast_[e] = true;
}

// One layer's time on the link.
void Simulator::move_prefetches(uint32_t layer) {
  double budget = options_.prefetch.transfers_per_layer;
  while (budget > 0 && (in_flight_ != kNone || start_prefetch(layer))) {
    const double moved = std::min(budget, left_);
    budget -= moved;
    left_ -= moved;
    if (left_ > 1e-9) return;
    residency_.landed(std::exchange(in_flight_, kNone));
  }
}

// The absent expert of the forecasts that is needed first. What is needed no later makes no room for it.
bool Simulator::start_prefetch(uint32_t layer) {
  const uint32_t num_layers = static_cast<uint32_t>(options_.layers.size());
  for (uint32_t ahead = 0; ahead < num_layers; ++ahead) {
    const uint32_t l = (layer + 1 + ahead) % num_layers;
    for (const uint32_t expert : forecasts_[l]) {
      if (residency_.state(expert) != Residency::State::kAbsent) continue;
      const auto is_needed_before = [&](uint32_t e) {
        return is_forecast_[e] && (layer_of_[e] + 2 * num_layers - layer - 1) % num_layers <= ahead;
      };
      if (!residency_.prefetch(expert, is_needed_before)) return false;
      in_flight_ = expert;
      left_ = 1;
      bytes_read_ += read_bytes(expert);
      return true;
    }
  }
  return false;
}

SimulatedCounters Simulator::counters() const {
  SimulatedCounters out;
  static_cast<Residency::Counters&>(out) = residency_.counters();
  out.passes = num_passes_;
  out.bytes_read = bytes_read_;
  out.prefetches_unused = prefetches_unused_;
  out.bytes_unused = bytes_unused_;
  out.loads_squared = loads_squared_;
  return out;
}

}  // namespace headrace
