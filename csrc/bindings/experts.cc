// Expert sources and the expert memory. A layer is given as headrace.formats.checkpoint.LayerExperts. The executor's
// binding takes ExpertMemory by reference; begin, take, release, end and read_slot are for tests.
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "experts/expert_memory.h"
#include "support/error.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace headrace {
namespace {

template <class T>
using Array = nb::ndarray<const T, nb::c_contig, nb::device::cpu>;

std::vector<ExpertExtent> read_extents(const Array<uint32_t>& file, const Array<uint64_t>& offset, size_t count) {
  if (file.size() != count || offset.size() != count) {
    throw Error("expert source: expected " + std::to_string(count) + " files and offsets a layer, found " +
                std::to_string(file.size()) + " and " + std::to_string(offset.size()));
  }
  std::vector<ExpertExtent> extents(count);
  for (size_t i = 0; i < count; ++i) extents[i] = {file.data()[i], offset.data()[i]};
  return extents;
}

LayerExperts read_layer(nb::handle layer) {
  LayerExperts out;
  const auto parts = nb::cast<std::vector<std::tuple<uint32_t, uint32_t, uint32_t>>>(nb::list(layer.attr("parts")));
  if (parts.size() != out.parts.size()) throw Error("expert source: expected gate, up and down in a layer");
  for (size_t i = 0; i < parts.size(); ++i) {
    const auto [dtype, rows, cols] = parts[i];
    if (!is_known_dtype(dtype)) throw Error("expert source: dtype " + std::to_string(dtype) + " is not known");
    out.parts[i] = {static_cast<DType>(dtype), rows, cols};
  }
  out.num_experts = nb::cast<uint32_t>(layer.attr("num_experts"));
  const auto file = nb::cast<Array<uint32_t>>(layer.attr("file"));
  const auto offset = nb::cast<Array<uint64_t>>(layer.attr("offset"));
  if (layer.attr("crc32c").is_none()) {
    out.rows = read_extents(file, offset, size_t{out.num_experts} * 3);
  } else {
    out.records = read_extents(file, offset, out.num_experts);
    const auto crc = nb::cast<Array<uint32_t>>(layer.attr("crc32c"));
    if (crc.size() != out.num_experts) throw Error("expert source: expected a checksum an expert");
    out.crc.assign(crc.data(), crc.data() + crc.size());
  }
  return out;
}

const LayerExperts& layer_at(const ExpertSource& source, uint32_t layer) {
  if (layer < source.layers.size()) return source.layers[layer];
  throw Error("expert source: expected a layer below " + std::to_string(source.layers.size()) + ", found " +
              std::to_string(layer));
}

ExpertMemoryOptions make_options(uint64_t arena_bytes, uint32_t loader_threads, bool direct_io,
                                 const std::string& policy, uint64_t hot_routes,
                                 std::optional<double> oracle_recall = std::nullopt, uint64_t oracle_seed = 0) {
  ExpertMemoryOptions options;
  options.arena_bytes = arena_bytes;
  options.loader_threads = loader_threads;
  options.direct_io = direct_io;
  options.policy = {policy, hot_routes};
  options.oracle_recall = oracle_recall;
  options.oracle_seed = oracle_seed;
  return options;
}

nb::dict to_dict(const ExpertCounters& c) {
  nb::dict out;
  out["hits"] = c.hits;
  out["late_hits"] = c.late_hits;
  out["loads"] = c.loads;
  out["prefetches"] = c.prefetches;
  out["evictions"] = c.evictions;
  out["bytes_read"] = c.bytes_read;
  out["bytes_unused"] = c.bytes_unused;
  out["io_wait_ns"] = c.io_wait_ns;
  out["io_busy_ns"] = c.io_busy_ns;
  return out;
}

nb::dict counters(const ExpertMemory& memory) {
  ExpertCounters c;
  {
    nb::gil_scoped_release release;  // resize() on another thread may hold the lock for a while
    c = memory.counters();
  }
  return to_dict(c);
}

template <class T>
nb::object to_array(std::vector<T> values) {
  auto* owned = new std::vector<T>(std::move(values));
  nb::capsule owner(owned, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return nb::cast(nb::ndarray<nb::numpy, T, nb::ndim<1>>(owned->data(), {owned->size()}, owner));
}

nb::tuple take_events(ExpertMemory& memory) {
  ExpertCounters c;
  std::vector<uint32_t> words;
  {
    nb::gil_scoped_release release;
    words = memory.take_events(c);
  }
  return nb::make_tuple(to_array(std::move(words)), to_dict(c));
}

template <class Row, class Field>
nb::object column(const std::vector<Row>& rows, Field field) {
  std::vector<std::remove_cvref_t<decltype(rows[0].*field)>> values;
  for (const Row& row : rows) values.push_back(row.*field);
  return to_array(std::move(values));
}

nb::dict take_timeline(ExpertMemory& memory) {
  Timeline timeline;
  {
    nb::gil_scoped_release release;
    timeline = memory.take_timeline();
  }
  using Read = Timeline::Read;
  using Compute = Timeline::Compute;
  using Layer = Timeline::Layer;
  nb::dict reads, computes, layers, out;
  reads["layer"] = column(timeline.reads, &Read::layer);
  reads["first_expert"] = column(timeline.reads, &Read::first_expert);
  reads["num_experts"] = column(timeline.reads, &Read::num_experts);
  reads["bytes"] = column(timeline.reads, &Read::bytes);
  reads["start_s"] = column(timeline.reads, &Read::start_s);
  reads["end_s"] = column(timeline.reads, &Read::end_s);
  computes["layer"] = column(timeline.computes, &Compute::layer);
  computes["first_expert"] = column(timeline.computes, &Compute::first_expert);
  computes["num_experts"] = column(timeline.computes, &Compute::num_experts);
  computes["num_routes"] = column(timeline.computes, &Compute::num_routes);
  computes["start_s"] = column(timeline.computes, &Compute::start_s);
  computes["end_s"] = column(timeline.computes, &Compute::end_s);
  layers["layer"] = column(timeline.layers, &Layer::layer);
  layers["routed_s"] = column(timeline.layers, &Layer::routed_s);
  out["reads"] = reads;
  out["computes"] = computes;
  out["layers"] = layers;
  return out;
}

}  // namespace

void init_experts(nb::module_& m) {
  nb::class_<ExpertSource>(m, "ExpertSource", "Where the experts of a checkpoint lie in its files.")
      .def(
          "__init__",
          [](ExpertSource* self, std::vector<std::string> files, nb::list layers) {
            ExpertSource source;
            source.files = std::move(files);
            for (nb::handle layer : layers) source.layers.push_back(read_layer(layer));
            check_layers(source);  // so that sizes asked of it are possible
            new (self) ExpertSource(std::move(source));
          },
          "files"_a, "layers"_a)
      .def(
          "record_bytes",
          [](const ExpertSource& source, uint32_t layer) { return record_bytes(layer_at(source, layer)); }, "layer"_a,
          "Bytes of a slot that holds an expert of this layer.")
      .def(
          "total_bytes",
          [](const ExpertSource& source) {
            uint64_t total = 0;
            for (const LayerExperts& layer : source.layers) total += layer.num_experts * record_bytes(layer);
            return total;
          },
          "Bytes of slots that hold all experts.");

  m.def(
      "disturb_reads",
      [](uint32_t max_us, uint64_t short_every, uint64_t fail_at) {
        nb::gil_scoped_release release;
        if (max_us == 0 && short_every == 0 && fail_at == 0) return set_read_hook(nullptr);
        auto reads = std::make_shared<std::atomic<uint64_t>>(0);
        set_read_hook([=](const std::string&, uint64_t, uint64_t) {
          const uint64_t n = ++*reads;
          if (max_us) std::this_thread::sleep_for(std::chrono::microseconds((n * 0x9E3779B97F4A7C15u >> 32) % max_us));
          if (n == fail_at) return EIO;
          return short_every && n % short_every == 0 ? -1 : 0;
        });
      },
      "max_us"_a = 0, "short_every"_a = 0, "fail_at"_a = 0,
      "For tests: every read of an expert waits for up to max_us before it starts, each short_every-th gives half of\n"
      "what was asked for, and the fail_at-th from now fails. Without arguments nothing of that happens.");

  using NoGil = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<ExpertMemory>(m, "ExpertMemory", "The arena of expert slots, and the threads that load experts.")
      .def(
          "__init__",
          [](ExpertMemory* self, const ExpertSource& source, uint64_t arena_bytes, uint32_t loader_threads,
             bool direct_io, const std::string& policy, uint64_t hot_routes, std::optional<double> oracle_recall,
             uint64_t oracle_seed) {
            nb::gil_scoped_release release;
            new (self) ExpertMemory(source, make_options(arena_bytes, loader_threads, direct_io, policy, hot_routes,
                                                         oracle_recall, oracle_seed));
          },
          "source"_a, "arena_bytes"_a, "loader_threads"_a = 2, "direct_io"_a = true, "policy"_a = "lru",
          "hot_routes"_a = 0, "oracle_recall"_a = nb::none(), "oracle_seed"_a = 0,
          "policy: one of policy_names(). hot_routes: of a layer, those that prefill-hot counts (docs/policies.md). "
          "oracle_recall: prefetches what expect() told, as an oracle that names this share of what is absent.")
      .def_static(
          "overhead_bytes",
          [](const ExpertSource& source, uint32_t loader_threads, const std::string& policy) {
            return ExpertMemory::overhead_bytes(source, make_options(0, loader_threads, true, policy, 0));
          },
          "source"_a, "loader_threads"_a = 2, "policy"_a = "lru", "What it holds besides the arena.")
      .def("counters", &counters, "Expert counters since construction, by name.")
      .def("record_events", &ExpertMemory::record_events, NoGil(),
           "Keeps what happens beside the routes from now on, for a replay.")
      .def("take_events", &take_events, "(uint32 words of csrc/experts/read_events.h, counters) since the last call.")
      .def("record_timeline", &ExpertMemory::record_timeline, "on"_a, NoGil(),
           "Starts keeping when experts of streamed passes are read and used, in seconds from now; or stops.")
      .def("take_timeline", &take_timeline,
           "{'reads': {layer, first_expert, num_experts, bytes, start_s, end_s}, 'computes': {layer, first_expert, "
           "num_experts, num_routes, start_s, end_s}, 'layers': {layer, routed_s}}, arrays with an element each; "
           "first_expert: of the layer.")
      .def("resize", &ExpertMemory::resize, "arena_bytes"_a, NoGil(),
           "Moves the ceiling on slot bytes, between passes.")
      .def_prop_ro("arena_bytes", &ExpertMemory::arena_bytes, NoGil())
      .def_prop_ro("committed_bytes", &ExpertMemory::committed_bytes, NoGil())
      .def_prop_ro("num_slots", &ExpertMemory::num_slots, NoGil(), "Slots of the largest record that the arena holds.")
      .def_prop_ro("resident_experts", &ExpertMemory::resident_experts, NoGil())
      .def("read_bytes", &ExpertMemory::read_bytes, "layer"_a,
           "Of each expert of the layer, what loading it adds to bytes_read.")
      .def_prop_ro("total_experts", &ExpertMemory::total_experts)
      .def(
          "begin",
          [](ExpertMemory& memory, uint32_t layer, const std::vector<uint32_t>& ids,
             const std::vector<uint32_t>& num_routes) { memory.begin(layer, ids, num_routes); },
          "layer"_a, "ids"_a, "num_routes"_a = std::vector<uint32_t>(), NoGil())
      .def(
          "expect",
          [](ExpertMemory& memory, uint32_t layer, const std::vector<uint32_t>& ids) { memory.expect(layer, ids); },
          "layer"_a, "ids"_a, NoGil(), "What a later pass will route to, for a policy with an oracle.")
      .def(
          "take",
          [](ExpertMemory& memory, bool in_order, uint32_t max_taken) {
            std::vector<uint32_t> taken;
            memory.take(in_order, max_taken, taken, nullptr);
            return taken;
          },
          "in_order"_a = false, "max_taken"_a = UINT32_MAX, NoGil(), "Indices into ids; empty when all were taken.")
      .def(
          "begin_stream",
          [](ExpertMemory& memory, uint32_t group_size, uint32_t queue_depth, uint32_t banks, bool reads_early,
             const std::vector<bool>& may_read_early, bool is_first) {
            memory.begin_stream({group_size, queue_depth, banks, reads_early}, may_read_early, is_first);
          },
          "group_size"_a, "queue_depth"_a, "banks"_a, "reads_early"_a, "may_read_early"_a, "is_first"_a, NoGil())
      .def("end_stream", &ExpertMemory::end_stream, NoGil())
      .def("release", &ExpertMemory::release, "index"_a, NoGil())
      .def("end", &ExpertMemory::end, NoGil())
      .def(
          "read_slot",
          [](const ExpertMemory& memory, uint32_t layer, uint32_t index) {
            const uint64_t n = record_bytes(layer_at(memory.source(), layer));
            return nb::bytes(memory.address(index), n);
          },
          "layer"_a, "index"_a, "The bytes of a taken expert of the layer in progress.");
}

}  // namespace headrace
