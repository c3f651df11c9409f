#include "experts/policy.h"

#include <algorithm>
#include <bit>
#include <deque>

#include "support/error.h"

namespace headrace {

Policy::Policy(const std::vector<LayerShape>& layers) {
  size_t n = 0;
  for (const LayerShape& layer : layers) n += layer.num_experts;
  last_use_.resize(n, 0);
}

void Policy::observe(uint32_t, std::span<const uint32_t>, std::vector<uint32_t>&) {}
void Policy::use(uint32_t expert, uint32_t) { last_use_[expert] = ++num_uses_; }
void Policy::expect(uint32_t, std::span<const uint32_t>, std::vector<uint32_t>&) {}

namespace {

std::vector<uint32_t> first_experts(const std::vector<LayerShape>& layers) {
  std::vector<uint32_t> first;
  uint32_t n = 0;
  for (const LayerShape& layer : layers) {
    first.push_back(n);
    n += layer.num_experts;
  }
  return first;
}

class LeastRecent : public Policy {
 public:
  using Policy::Policy;
  Key key(uint32_t expert) const override { return {last_use(expert), 0}; }
};

// Routes since the start, whether the expert was resident or not; the least recent of the least frequent.
class LeastFrequent : public Policy {
 public:
  explicit LeastFrequent(const std::vector<LayerShape>& layers) : Policy(layers), routes_(num_experts(), 0) {}
  void use(uint32_t expert, uint32_t num_routes) override {
    Policy::use(expert, num_routes);
    routes_[expert] += num_routes;
  }
  Key key(uint32_t expert) const override { return {routes_[expert], last_use(expert)}; }

 protected:
  uint64_t routes(uint32_t expert) const { return routes_[expert]; }

 private:
  std::vector<uint64_t> routes_;  // [expert]
};

// Frequency by powers of two, recency within.
class FrequencyThenRecency : public LeastFrequent {
 public:
  using LeastFrequent::LeastFrequent;
  Key key(uint32_t expert) const override {
    return {static_cast<uint64_t>(std::bit_width(routes(expert))), last_use(expert)};
  }
};

// As LeastFrequent, but only the first passes count.
class PrefillHot : public LeastFrequent {
 public:
  PrefillHot(const std::vector<LayerShape>& layers, uint64_t hot_routes)
      : LeastFrequent(layers), hot_routes_(hot_routes), seen_(layers.size(), 0), counts_(layers.size(), false) {
    for (uint32_t l = 0; l < layers.size(); ++l) layer_of_.insert(layer_of_.end(), layers[l].num_experts, l);
  }
  void observe(uint32_t layer, std::span<const uint32_t>, std::vector<uint32_t>&) override {
    counts_[layer] = seen_[layer] < hot_routes_;  // a pass counts whole or not at all
  }
  void use(uint32_t expert, uint32_t num_routes) override {
    const uint32_t layer = layer_of_[expert];
    if (!counts_[layer]) return Policy::use(expert, num_routes);
    LeastFrequent::use(expert, num_routes);
    seen_[layer] += num_routes;
  }

 private:
  const uint64_t hot_routes_;
  std::vector<uint64_t> seen_;      // [layer]: routes of the passes that counted
  std::vector<uint32_t> layer_of_;  // [expert]
  std::vector<bool> counts_;        // [layer]
};

// How likely an expert is in the layer's next pass: the mean, over the experts of its last pass, of how often a pass
// with that expert was followed by one with this.
class Markov : public Policy {
 public:
  explicit Markov(const std::vector<LayerShape>& layers)
      : Policy(layers), first_(first_experts(layers)), layers_(layers.size()), chance_(num_experts(), 0) {
    for (size_t l = 0; l < layers.size(); ++l) {
      const size_t n = layers[l].num_experts;
      layers_[l].followed.resize(n * n, 0);
      layers_[l].passes.resize(n, 0);
    }
  }
  void observe(uint32_t layer, std::span<const uint32_t> experts, std::vector<uint32_t>& changed) override {
    Layer& l = layers_[layer];
    const uint32_t first = first_[layer], n = static_cast<uint32_t>(l.passes.size());
    for (const uint32_t a : l.last) {
      ++l.passes[a];
      for (const uint32_t b : experts) ++l.followed[size_t{a} * n + b - first];
    }
    l.last.clear();
    for (const uint32_t b : experts) l.last.push_back(b - first);
    std::fill_n(chance_.begin() + first, n, uint64_t{0});
    for (const uint32_t a : l.last) {
      if (l.passes[a] == 0) continue;
      const uint64_t share = (uint64_t{1} << 32) / l.passes[a];
      for (uint32_t b = 0; b < n; ++b) chance_[first + b] += share * l.followed[size_t{a} * n + b];
    }
    for (uint32_t b = 0; b < n; ++b) {
      if (!l.last.empty()) chance_[first + b] /= l.last.size();
      changed.push_back(first + b);
    }
  }
  Key key(uint32_t expert) const override { return {chance_[expert], last_use(expert)}; }

 private:
  struct Layer {
    std::vector<uint32_t>
        followed;                  // [expert, expert]: passes with the first that were followed by one with the second
    std::vector<uint32_t> passes;  // [expert]: passes with it that were followed by another
    std::vector<uint32_t> last;    // experts of the last pass
  };
  std::vector<uint32_t> first_;  // [layer]
  std::vector<Layer> layers_;
  std::vector<uint64_t> chance_;  // [expert], times 2^32
};

// The oracle: what is used furthest in the future, of which nothing is known first.
class Belady : public Policy {
 public:
  explicit Belady(const std::vector<LayerShape>& layers)
      : Policy(layers), uses_(num_experts()), visits_(layers.size()) {}

  void expect(uint32_t layer, std::span<const uint32_t> experts, std::vector<uint32_t>& changed) override {
    if (experts.empty()) return;
    const uint64_t time = ++num_expected_;
    visits_[layer].push_back({time, static_cast<uint32_t>(experts.size())});
    for (const uint32_t e : experts) {
      if (uses_[e].empty()) changed.push_back(e);
      uses_[e].push_back(time);
    }
  }
  void observe(uint32_t layer, std::span<const uint32_t> experts, std::vector<uint32_t>&) override {
    if (visits_[layer].empty() || experts.empty()) return;
    const Visit visit = visits_[layer].front();
    const bool same = visit.num_experts == experts.size() &&
                      std::all_of(experts.begin(), experts.end(),
                                  [&](uint32_t e) { return !uses_[e].empty() && uses_[e].front() == visit.time; });
    if (!same) {
      throw Error("belady: the routes of layer " + std::to_string(layer) +
                  " are not those that were announced; replay the trace from which the future was taken");
    }
    visits_[layer].pop_front();
  }
  void use(uint32_t expert, uint32_t num_routes) override {
    Policy::use(expert, num_routes);
    if (!uses_[expert].empty()) uses_[expert].pop_front();
  }
  // Among experts of one layer and pass the furthest in storage order goes first: the others are needed before it.
  Key key(uint32_t expert) const override {
    if (uses_[expert].empty()) return {0, last_use(expert)};
    return {UINT64_MAX - uses_[expert].front(), UINT64_MAX - expert};
  }

 private:
  struct Visit {
    uint64_t time;
    uint32_t num_experts;
  };
  std::vector<std::deque<uint64_t>> uses_;  // [expert]: when it will be used
  std::vector<std::deque<Visit>> visits_;   // [layer]
  uint64_t num_expected_ = 0;               // layers of passes
};

constexpr const char* kNames[] = {"lru", "lfu", "lfru", "prefill-hot", "markov", "belady"};

}  // namespace

std::vector<std::string> policy_names() { return {std::begin(kNames), std::end(kNames)}; }

std::unique_ptr<Policy> make_policy(const PolicyOptions& options, const std::vector<LayerShape>& layers) {
  const std::string& name = options.name;
  if (name == "lru") return std::make_unique<LeastRecent>(layers);
  if (name == "lfu") return std::make_unique<LeastFrequent>(layers);
  if (name == "lfru") return std::make_unique<FrequencyThenRecency>(layers);
  if (name == "prefill-hot") return std::make_unique<PrefillHot>(layers, options.hot_routes);
  if (name == "markov") return std::make_unique<Markov>(layers);
  if (name == "belady") return std::make_unique<Belady>(layers);
  std::string known;
  for (const char* n : kNames) known += (known.empty() ? "" : ", ") + std::string(n);
  throw Error("cache policy: expected one of " + known + ", found '" + name + "'");
}

uint64_t policy_bytes(const PolicyOptions& options, const std::vector<LayerShape>& layers) {
  uint64_t bytes = 0;
  for (const LayerShape& layer : layers) {
    const uint64_t n = layer.num_experts;
    bytes += n * 32;  // last use, routes, layer or chance
    if (options.name == "markov") bytes += n * n * sizeof(uint32_t);
  }
  return bytes;
}

}  // namespace headrace
