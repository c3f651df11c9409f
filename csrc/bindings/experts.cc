// Expert sources and the expert memory. The engine builds them, the executor's binding takes ExpertMemory by reference;
// begin, take, release and read_slot are for tests.
#include <nanobind/ndarray.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "experts/expert_memory.h"
#include "experts/expert_source.h"
#include "support/error.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace headrace {
namespace {

template <class T, size_t kDims>
using Table = nb::ndarray<const T, nb::ndim<kDims>, nb::c_contig, nb::device::cpu>;
using Parts = std::array<std::tuple<uint32_t, uint32_t, uint32_t>, 3>;  // (dtype, rows, cols): gate, up, down

LayerExperts layer_of(const Parts& parts, size_t num_experts) {
  LayerExperts layer;
  if (num_experts >= UINT32_MAX) throw Error("expert layer: expected under 2^32 experts");
  layer.num_experts = static_cast<uint32_t>(num_experts);
  for (size_t p = 0; p < 3; ++p) {
    const auto& [type, rows, cols] = parts[p];
    layer.parts[p] = {static_cast<DType>(type), rows, cols};
  }
  return layer;
}

void expect_shape(const char* what, size_t expected, size_t found) {
  if (expected == found) return;
  throw Error(std::string("expert layer: expected ") + std::to_string(expected) + " values of " + what + ", found " +
              std::to_string(found));
}

std::vector<ExpertExtent> extents(const uint32_t* file, const uint64_t* offset, size_t n) {
  std::vector<ExpertExtent> result(n);
  for (size_t i = 0; i < n; ++i) result[i] = {file[i], offset[i]};
  return result;
}

LayerExperts rows_layer(const Parts& parts, Table<uint32_t, 2> file, Table<uint64_t, 2> offset) {
  LayerExperts layer = layer_of(parts, file.shape(0));
  expect_shape("file per expert", 3, file.shape(1));
  expect_shape("offset per expert", 3, offset.shape(1));
  expect_shape("offset", file.size(), offset.size());
  layer.rows = extents(file.data(), offset.data(), file.size());
  return layer;
}

LayerExperts packed_layer(const Parts& parts, Table<uint32_t, 1> file, Table<uint64_t, 1> offset,
                          Table<uint32_t, 1> crc) {
  LayerExperts layer = layer_of(parts, file.shape(0));
  expect_shape("offset", file.size(), offset.size());
  expect_shape("crc", file.size(), crc.size());
  layer.records = extents(file.data(), offset.data(), file.size());
  layer.crc.assign(crc.data(), crc.data() + crc.size());
  return layer;
}

const LayerExperts& layer_at(const ExpertSource& source, uint32_t layer) {
  if (layer < source.layers.size()) return source.layers[layer];
  throw Error("expert source: expected a layer below " + std::to_string(source.layers.size()) + ", found " +
              std::to_string(layer));
}

nb::dict counters_dict(const ExpertMemory& memory) {
  ExpertCounters c;
  {
    nb::gil_scoped_release release;
    c = memory.counters();
  }
  nb::dict d;
  d["hits"] = c.hits;
  d["late_hits"] = c.late_hits;
  d["loads"] = c.loads;
  d["prefetches"] = c.prefetches;
  d["bytes_read"] = c.bytes_read;
  d["bytes_unused"] = c.bytes_unused;
  d["io_wait_s"] = static_cast<double>(c.io_wait_ns) * 1e-9;
  return d;
}

}  // namespace

void init_experts(nb::module_& m) {
  nb::class_<LayerExperts>(m, "ExpertLayer", "Where one layer's routed experts lie. parts: (dtype, rows, cols) x 3.")
      .def_static("rows", &rows_layer, "parts"_a, "file"_a, "offset"_a,
                  "Rows as the file stores them. file: uint32 [E, 3], offset: uint64 [E, 3] (gate, up, down), bytes.")
      .def_static("packed", &packed_layer, "parts"_a, "file"_a, "offset"_a, "crc"_a,
                  "A store's records. file: uint32 [E], offset: uint64 [E] (bytes), crc: uint32 [E] (CRC-32C).")
      .def_static(
          "none", [] { return LayerExperts(); }, "A layer without routed experts.")
      .def_ro("num_experts", &LayerExperts::num_experts)
      .def_prop_ro("is_packed", [](const LayerExperts& l) { return !l.records.empty(); })
      .def_prop_ro("record_bytes", [](const LayerExperts& l) { return l.num_experts ? record_bytes(l) : 0; });

  nb::class_<ExpertSource>(m, "ExpertSource",
                           "All layers' experts in files. Raises HeadraceError on impossible tables.")
      .def(
          "__init__",
          [](ExpertSource* self, std::vector<std::string> files, std::vector<LayerExperts> layers) {
            ExpertSource source{std::move(files), std::move(layers)};
            check_layers(source);
            new (self) ExpertSource(std::move(source));
          },
          "files"_a, "layers"_a)
      .def_ro("files", &ExpertSource::files)
      .def_prop_ro("num_layers", [](const ExpertSource& s) { return s.layers.size(); })
      .def(
          "record_bytes",
          [](const ExpertSource& s, uint32_t layer) {
            const LayerExperts& l = layer_at(s, layer);
            return l.num_experts ? record_bytes(l) : 0;
          },
          "layer"_a, "Bytes of one expert of the layer in a slot; 0 if it has none.")
      .def("total_bytes", [](const ExpertSource& s) {
        uint64_t n = 0;
        for (const LayerExperts& l : s.layers) n += l.num_experts ? l.num_experts * record_bytes(l) : 0;
        return n;
      });

  using NoGil = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<ExpertMemory>(
      m, "ExpertMemory",
      "The bounded arena of expert slots and the threads that load into it. Counters and sizes may "
      "be asked for by any thread, resize() between passes.")
      .def(
          "__init__",
          [](ExpertMemory* self, const ExpertSource& source, uint64_t arena_bytes, uint32_t loader_threads,
             bool direct_io) { new (self) ExpertMemory(source, {arena_bytes, loader_threads, direct_io}); },
          "source"_a, "arena_bytes"_a, "loader_threads"_a = 2, "direct_io"_a = true, NoGil(),
          "Opens and checks the files and commits arena_bytes. Raises HeadraceError.")
      .def("counters", &counters_dict, "Sums since construction, as DESIGN.md names them; io_wait_s in seconds.")
      .def("resize", &ExpertMemory::resize, "arena_bytes"_a, NoGil())
      .def_prop_ro("arena_bytes", &ExpertMemory::arena_bytes, NoGil())
      .def_prop_ro("committed_bytes", &ExpertMemory::committed_bytes, NoGil())
      .def_prop_ro("num_slots", &ExpertMemory::num_slots, NoGil())
      .def_prop_ro("resident_experts", &ExpertMemory::resident_experts, NoGil())
      .def_prop_ro("total_experts", &ExpertMemory::total_experts)
      .def_static(
          "overhead_bytes",
          [](const ExpertSource& source, uint64_t arena_bytes, uint32_t loader_threads) {
            return ExpertMemory::overhead_bytes(source, {arena_bytes, loader_threads, true});
          },
          "source"_a, "arena_bytes"_a, "loader_threads"_a = 2, "Bytes that it will hold besides the arena.")
      // For tests: what an executor does.
      .def(
          "begin",
          [](ExpertMemory& memory, uint32_t layer, const std::vector<uint32_t>& ids) { memory.begin(layer, ids); },
          "layer"_a, "ids"_a, NoGil())
      .def(
          "take",
          [](ExpertMemory& memory, bool in_order, uint32_t max_taken) {
            std::vector<uint32_t> taken;
            memory.take(in_order, max_taken, taken, nullptr);
            return taken;
          },
          "in_order"_a = false, "max_taken"_a = UINT32_MAX, NoGil(), "Indices into ids; empty when all were taken.")
      .def("release", &ExpertMemory::release, "index"_a, NoGil())
      .def("end", &ExpertMemory::end, NoGil())
      .def(
          "read_slot",
          [](const ExpertMemory& memory, uint32_t layer, uint32_t index) {
            return nb::bytes(memory.address(index), record_bytes(layer_at(memory.source(), layer)));
          },
          "layer"_a, "index"_a, "The bytes of a taken expert of the layer in progress.");
}

}  // namespace headrace
