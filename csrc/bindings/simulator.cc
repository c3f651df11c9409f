// The trace simulator and the cache policies' names.
#include "experts/simulator.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "support/error.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace headrace {
namespace {

using Events = nb::ndarray<const uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

using Routes = nb::ndarray<const int32_t, nb::ndim<3>, nb::c_contig, nb::device::cpu>;

void feed(Simulator& simulator, size_t num_layers, const Routes& ids) {
  if (ids.shape(1) != num_layers) {
    throw Error("simulator: expected routes [tokens, " + std::to_string(num_layers) + " layers, top_k], found " +
                std::to_string(ids.shape(1)) + " layers");
  }
  const uint32_t top_k = static_cast<uint32_t>(ids.shape(2));
  nb::gil_scoped_release release;
  simulator.feed(ids.data(), ids.shape(0), top_k);
}

nb::dict counters(const Simulator& simulator) {
  const SimulatedCounters c = simulator.counters();
  nb::dict out;
  out["passes"] = c.passes;
  out["hits"] = c.hits;
  out["late_hits"] = c.late_hits;
  out["loads"] = c.loads;
  out["prefetches"] = c.prefetches;
  out["prefetches_unused"] = c.prefetches_unused;
  out["evictions"] = c.evictions;
  out["bytes_read"] = c.bytes_read;
  out["bytes_unused"] = c.bytes_unused;
  out["loads_squared"] = c.loads_squared;
  return out;
}

}  // namespace

void init_simulator(nb::module_& m) {
  m.def("policy_names", &policy_names, "The cache policies.");
  nb::class_<LinkOptions>(m, "Link", "What a schedule bound assumes: csrc/experts/schedule_bound.h.")
      .def(
          "__init__",
          [](LinkOptions* self, double bytes_per_s, double latency_s, std::vector<double> before_s,
             std::vector<double> after_s, std::vector<uint32_t> triggers, uint32_t horizon) {
            new (self) LinkOptions{bytes_per_s,        latency_s,           std::move(before_s),
                                   std::move(after_s), std::move(triggers), horizon};
          },
          "bytes_per_s"_a, "latency_s"_a, "before_s"_a, "after_s"_a, "triggers"_a, "horizon"_a = 1);
  nb::class_<ScheduleBound>(m, "ScheduleBound", "How fast layers with given loads can be at best.")
      .def(nb::init<std::vector<uint64_t>, LinkOptions>(), "record_bytes"_a, "link"_a)
      .def("add", &ScheduleBound::add, "num_used"_a, "num_loads"_a, "The next layer, pass after pass.")
      .def("finish", &ScheduleBound::finish)
      .def_prop_ro("seconds", &ScheduleBound::seconds)
      .def_prop_ro("compute_seconds", &ScheduleBound::compute_seconds)
      .def_prop_ro("link_seconds", &ScheduleBound::link_seconds);
  nb::class_<Simulator>(m, "Simulator", "The engine's residency and policy, driven by the routes of a trace.")
      .def(
          "__init__",
          [](Simulator* self, const std::vector<uint32_t>& num_experts, const std::vector<uint64_t>& record_bytes,
             uint64_t capacity_bytes, const std::string& policy, uint64_t hot_routes, bool pins, uint32_t window,
             uint32_t lookahead, double transfers_per_layer, double recall, uint64_t seed,
             const std::vector<LinkOptions>& links, std::vector<uint64_t> read_bytes) {
            if (num_experts.size() != record_bytes.size()) {
              throw Error("simulator: expected a record size a layer, found " + std::to_string(record_bytes.size()) +
                          " for " + std::to_string(num_experts.size()) + " layers");
            }
            SimulatorOptions options;
            for (size_t l = 0; l < num_experts.size(); ++l) options.layers.push_back({num_experts[l], record_bytes[l]});
            options.capacity_bytes = capacity_bytes;
            options.policy = {policy, hot_routes};
            options.pins = pins;
            options.window = window;
            options.lookahead = lookahead;
            options.prefetch = {transfers_per_layer, recall, seed};
            options.links = links;
            options.read_bytes = std::move(read_bytes);
            new (self) Simulator(std::move(options));
          },
          "num_experts"_a, "record_bytes"_a, "capacity_bytes"_a, "policy"_a = "lru", nb::kw_only(), "hot_routes"_a = 0,
          "pins"_a = true, "window"_a = 1, "lookahead"_a = 0, "transfers_per_layer"_a = 0.0, "recall"_a = 1.0,
          "seed"_a = 0, "links"_a = std::vector<LinkOptions>(), "read_bytes"_a = std::vector<uint64_t>(),
          "num_experts and record_bytes: of each layer. window: tokens a pass. links: a bound is kept for each. "
          "read_bytes: of each expert, if loading it reads more than its record.")
      .def_prop_ro("num_layers", &Simulator::num_layers)
      .def(
          "feed", [](Simulator& simulator, const Routes& ids) { feed(simulator, simulator.num_layers(), ids); },
          nb::arg("ids").noconvert(), "Routes int32 [tokens, layers, top_k]; a negative id is no route.")
      .def(
          "end_pass",
          [](Simulator& simulator, const Events& events) { simulator.end_pass({events.data(), events.size()}); },
          nb::arg("events").noconvert(), "As below; events: uint32, what ExpertMemory.take_events() gave for the pass.")
      .def(
          "end_pass", [](Simulator& simulator) { simulator.end_pass(); }, "What is fed next begins a pass of its own.")
      .def("resize", &Simulator::resize, "capacity_bytes"_a, "From the pass on that is being fed.")
      .def("finish", &Simulator::finish, nb::call_guard<nb::gil_scoped_release>(), "The trace is over.")
      .def_prop_ro("bounds", &Simulator::bounds, "Of each link; complete after finish().")
      .def("counters", &counters, "By name.");
}

}  // namespace headrace
