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
      scheduler_(
          options_.layers, options_.capacity_bytes, options_.policy,
          [this](uint32_t expert, bool was_taken) {
            if (was_taken) return;
            ++prefetches_unused_;
            bytes_unused_ += read_bytes(expert);
          },
          options_.prefetch.transfers_per_layer > 0 ? 1 : ReadScheduler::kPrefetches),
      capacity_bytes_(options_.capacity_bytes),
      routes_(residency_.num_experts(), 0),
      used_(options_.layers.size()),
      oracle_(options_.prefetch.recall, options_.prefetch.seed) {
  std::vector<uint64_t> record_bytes;
  for (uint32_t l = 0; l < options_.layers.size(); ++l) {
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

void Simulator::queue_pass(std::optional<std::vector<uint32_t>> events) {
  if (tokens_in_pass_ == 0) return;
  tokens_in_pass_ = 0;
  Pass pass;
  pass.events = std::move(events);
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
    if (options_.lookahead > 0) scheduler_.expect(l, used_[l]);
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
  if (pass.events) return replay_pass(pass, *pass.events);
  if (pass.capacity_bytes != residency_.capacity_bytes()) {
    if (in_flight_ != kNone) land(std::exchange(in_flight_, kNone), false, {});
    scheduler_.resize(pass.capacity_bytes);
  }
  const uint64_t before = residency_.counters().loads;
  for (uint32_t l = 0; l < options_.layers.size(); ++l) {
    const uint32_t n = pass.first[l + 1] - pass.first[l];
    const std::span<const uint32_t> ids(pass.ids.data() + pass.first[l], n);
    const std::span<const uint32_t> num_routes(pass.num_routes.data() + pass.first[l], n);
    const uint64_t loads = residency_.counters().loads;
    if (n > 0) scheduler_.observe(l, ids);  // an engine passes over a layer that no row goes through
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
  scheduler_.begin(layer, ids, num_routes);
  const auto load = [&] {
    ReadScheduler::Read read;
    while (scheduler_.next(read, /*may_guess=*/false)) land(read.experts[0], false, {});
  };
  load();
  for (uint32_t i = 0; i < ids.size(); ++i) {
    const Residency::Entry& entry = residency_.entries()[i];
    if (entry.status == Residency::Status::kLoading) {  // a late hit: the pass waits for it
      land(entry.expert, false, {});
      in_flight_ = kNone;
    }
    scheduler_.take(i);
    scheduler_.release(i);
    load();
  }
  if (is_last && options_.prefetch.transfers_per_layer > 0) {
    forecast(layer);
    move_prefetches();
  }
  scheduler_.end();
}

// A read is over. costs: what it read of each expert that has no slot now.
void Simulator::land(uint32_t first_expert, bool has_failed, std::span<const uint32_t> costs) {
  const std::vector<uint32_t>& experts = scheduler_.in_flight(first_expert)->experts;
  uint64_t whole = 0;
  for (const uint32_t expert : experts) whole += residency_.is_unwanted(expert) ? 0 : read_bytes(expert);
  no_costs_.assign(experts.size(), 0);  // they are counted here
  if (has_failed) {
    scheduler_.failed(first_expert, no_costs_, gone_);
  } else {
    scheduler_.landed(first_expert, no_costs_, gone_);
    bytes_read_ += whole;
  }
  for (const uint32_t cost : costs) {
    bytes_read_ += cost;
    bytes_unused_ += cost;
  }
}

uint64_t Simulator::read_bytes(uint32_t expert) const {
  return options_.read_bytes.empty() ? options_.layers[residency_.layer_of(expert)].record_bytes
                                     : options_.read_bytes[expert];
}

// ---- prefetch

// What the layer's next pass needs, as the noisy oracle says when the layer has run.
void Simulator::forecast(uint32_t layer) {
  if (pending_.empty()) return scheduler_.forecast(layer, {});
  const Pass& pass = pending_.front();
  const std::span<const uint32_t> ids(pass.ids.data() + pass.first[layer], pass.first[layer + 1] - pass.first[layer]);
  scheduler_.forecast(layer, oracle_.forecast(residency_, layer, options_.layers[layer].num_experts, ids));
}

// One layer's time on the link.
void Simulator::move_prefetches() {
  double budget = options_.prefetch.transfers_per_layer;
  while (budget > 0) {
    if (in_flight_ == kNone) {
      ReadScheduler::Read read;
      if (!scheduler_.next(read)) return;
      in_flight_ = read.experts[0];
      left_ = 1;
    }
    const double moved = std::min(budget, left_);
    budget -= moved;
    left_ -= moved;
    if (left_ > 1e-9) return;
    land(std::exchange(in_flight_, kNone), false, {});
  }
}

// ---- a recorded pass

void Simulator::replay_pass(const Pass& pass, std::span<const uint32_t> events) {
  size_t at = 0;
  const auto require = [&](bool holds) {
    if (!holds) throw Error("simulator: event " + std::to_string(at) + " of a recorded pass cannot be");
  };
  const auto words = [&](size_t n) {
    require(n <= events.size() - at);
    at += n;
    return events.subspan(at - n, n);
  };
  const auto is_between_passes = [&] {
    return !residency_.is_active() && !residency_.is_streaming() && scheduler_.num_in_flight() == 0;
  };
  while (at < events.size()) {
    const uint32_t word = words(1)[0], argument = word >> 4;
    switch (static_cast<ReadEvent>(word & 15)) {
      case ReadEvent::kBegin: {
        require(!residency_.is_active() && argument < options_.layers.size());
        const uint32_t first = pass.first[argument], n = pass.first[argument + 1] - first;
        require(n > 0 && (!residency_.is_streaming() || argument >= residency_.num_layers_begun()));
        const std::span<const uint32_t> ids(pass.ids.data() + first, n);
        scheduler_.observe(argument, ids);
        scheduler_.begin(argument, ids, {pass.num_routes.data() + first, n});
        break;
      }
      case ReadEvent::kRelease:
        require(residency_.is_active() && argument < residency_.entries().size() &&
                residency_.entries()[argument].status == Residency::Status::kReady);
        scheduler_.take(argument);
        scheduler_.release(argument);
        break;
      case ReadEvent::kEnd:
        require(residency_.is_active() && residency_.num_loading() == 0);
        scheduler_.end();
        break;
      case ReadEvent::kLanded:
      case ReadEvent::kFailed: {
        const ReadScheduler::Read* read = scheduler_.in_flight(argument);
        require(read != nullptr);
        const bool has_failed = static_cast<ReadEvent>(word & 15) == ReadEvent::kFailed;
        size_t num_gone = read->experts.size();
        if (!has_failed) {
          num_gone = static_cast<size_t>(std::count_if(read->experts.begin(), read->experts.end(),
                                                       [&](uint32_t e) { return residency_.is_unwanted(e); }));
        }
        land(argument, has_failed, words(num_gone));
        break;
      }
      case ReadEvent::kForecast: {
        require(argument < options_.layers.size());
        const auto experts = words(words(1)[0]);
        // All of the layer, so that what is kept of forecasts is bounded.
        const uint32_t first = residency_.first_expert(argument), n = options_.layers[argument].num_experts;
        require(experts.size() <= n);
        for (const uint32_t e : experts) require(e >= first && e - first < n);
        scheduler_.forecast(argument, {experts.begin(), experts.end()});
        continue;  // what follows says what to do with it
      }
      case ReadEvent::kBeginStream: {
        const auto settings = words(4 + options_.layers.size());
        require(is_between_passes() && settings[0] > 0 && settings[1] > 0 && settings[2] > 0);
        scheduler_.begin_stream({settings[0], settings[1], settings[2], settings[3] != 0},
                                {settings.begin() + 4, settings.end()}, argument != 0);
        break;
      }
      case ReadEvent::kEndStream:
        require(residency_.is_streaming() && !residency_.is_active() && scheduler_.num_in_flight() == 0);
        scheduler_.end_stream();
        break;
      case ReadEvent::kResize: {
        const auto size = words(2);
        require(is_between_passes());
        const uint64_t capacity_bytes = size[0] | uint64_t{size[1]} << 32;
        check_capacity(options_.layers, capacity_bytes);
        scheduler_.resize(capacity_bytes);
        break;
      }
      case ReadEvent::kHold: scheduler_.hold(argument != 0); break;
      default: require(false);
    }
    ReadScheduler::Read read;
    while (scheduler_.next(read)) continue;
  }
  require(!residency_.is_active() && !residency_.is_streaming());
  ++num_passes_;
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
