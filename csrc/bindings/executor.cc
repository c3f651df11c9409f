#include "executor/executor.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <atomic>
#include <chrono>
#include <optional>
#include <string>
#include <tuple>

#include "bindings/bindings.h"
#include "support/error.h"

namespace headrace {

namespace nb = nanobind;
using namespace nb::literals;

namespace {

template <class T>
using Vector = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Logits = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
template <class T>
using Routes = nb::ndarray<T, nb::ndim<3>, nb::c_contig, nb::device::cpu>;

// Set by any thread; the pass that was given it ends within some 50 ms.
struct CancelFlag {
  std::atomic<bool> is_set{false};
};

// What a pass asks now and then: has the flag been set, or has Python a signal to handle (Ctrl-C)? The interpreter is
// taken for that only every 20 ms; other Python threads run meanwhile.
class StopCheck {
 public:
  explicit StopCheck(const CancelFlag* flag) : flag_(flag), next_(std::chrono::steady_clock::now() + kInterval) {}

  bool operator()() {
    if (flag_ != nullptr && flag_->is_set.load(std::memory_order_relaxed)) return true;
    const auto now = std::chrono::steady_clock::now();
    if (now < next_) return false;
    next_ = now + kInterval;
    nb::gil_scoped_acquire gil;
    return PyErr_CheckSignals() != 0;
  }

 private:
  static constexpr auto kInterval = std::chrono::milliseconds(20);
  const CancelFlag* flag_;
  std::chrono::steady_clock::time_point next_;
};

DType to_dtype(uint32_t value) {
  if (!is_known_dtype(value)) throw Error("unknown type " + std::to_string(value));
  return static_cast<DType>(value);
}

using Stream = std::tuple<uint32_t, uint32_t, uint32_t, bool, bool>;

uint64_t vocab_size(const Program& program) { return program.values[program.logits].width; }

Program program_from_bytes(nb::bytes data) {
  return parse_program({static_cast<const uint8_t*>(data.data()), data.size()});
}

void load_weight(Weights& weights, uint32_t index, const std::string& tensor, const std::string& file, uint64_t offset,
                 uint64_t nbytes, uint32_t dtype, bool packed, std::optional<uint32_t> crc) {
  const DType type = to_dtype(dtype);
  nb::gil_scoped_release release;
  weights.load(index, tensor, file, offset, nbytes, type, packed, crc.has_value(), crc.value_or(0));
}

// [layers, rows, top_k] as a flat span; empty where nothing was given.
template <class T>
std::span<T> flat_routes(const Executor& executor, const std::optional<Routes<T>>& routes, size_t num_rows) {
  if (!routes) return {};
  const RoutingShape shape = executor.routing();
  if (routes->shape(0) != shape.num_layers || routes->shape(1) != num_rows || routes->shape(2) != shape.top_k)
    throw Error("pass: routes of shape [" + std::to_string(routes->shape(0)) + ", " + std::to_string(routes->shape(1)) +
                ", " + std::to_string(routes->shape(2)) + "], expected [" + std::to_string(shape.num_layers) + ", " +
                std::to_string(num_rows) + ", " + std::to_string(shape.top_k) + "]");
  return {routes->data(), routes->size()};
}

void run_pass(Executor& executor, Vector<int32_t> tokens, Vector<uint32_t> sequences,
              const std::vector<SessionState*>& states, Vector<uint32_t> out_rows, std::optional<Logits> logits,
              const CancelFlag* cancel, const std::optional<Routes<const int32_t>>& routes,
              const std::optional<Routes<int32_t>>& ids, const std::optional<Routes<float>>& weights,
              const std::optional<Routes<float>>& scores, bool per_slot, const std::optional<Stream>& stream,
              const std::optional<Vector<int32_t>>& targets,
              const std::optional<nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>>& log_probs) {
  const uint64_t vocab = vocab_size(executor.program());
  if (logits && (logits->shape(0) != out_rows.shape(0) || logits->shape(1) != vocab))
    throw Error("pass: logits of shape [" + std::to_string(logits->shape(0)) + ", " + std::to_string(logits->shape(1)) +
                "], expected [" + std::to_string(out_rows.shape(0)) + ", " + std::to_string(vocab) + "]");
  if (logits.has_value() == targets.has_value() || targets.has_value() != log_probs.has_value() ||
      (log_probs && log_probs->shape(0) != targets->shape(0)))
    throw Error("pass: give room for logits, or targets and room for as many log-probabilities");
  Pass pass;
  pass.tokens = {tokens.data(), tokens.shape(0)};
  pass.sequences = {sequences.data(), sequences.shape(0)};
  pass.states = states;
  pass.out_rows = {out_rows.data(), out_rows.shape(0)};
  if (logits) pass.logits = logits->data();
  if (targets) {
    pass.targets = {targets->data(), targets->shape(0)};
    pass.log_probs = log_probs->data();
  }
  const size_t n = tokens.shape(0);
  pass.routing = {flat_routes<const int32_t>(executor, routes, n), flat_routes(executor, ids, n),
                  flat_routes(executor, weights, n), flat_routes(executor, scores, n)};
  pass.per_slot = per_slot;
  if (stream) {
    const auto [group_size, queue_depth, banks, reads_early, is_first] = *stream;
    pass.stream = StreamedPass{{group_size, queue_depth, banks, reads_early}, is_first};
  }
  StopCheck stop(cancel);
  pass.should_stop = std::ref(stop);
  try {
    nb::gil_scoped_release release;
    executor.run(pass);
  } catch (const Cancelled&) {
    if (PyErr_Occurred()) throw nb::python_error();  // a signal handler's exception, such as KeyboardInterrupt
    throw Error("cancelled");
  }
}

nb::dict op_seconds(const Executor& executor) {
  std::array<uint64_t, kNumOps> ns;
  {
    nb::gil_scoped_release release;  // it waits for a running pass, which asks for the GIL now and then
    ns = executor.op_ns();
  }
  nb::dict out;
  for (uint32_t i = 0; i < kNumOps; ++i) out[kOps[i].name] = static_cast<double>(ns[i]) * 1e-9;
  return out;
}

void init_program(nb::module_& m) {
  nb::class_<Program>(m, "Program", "A compiled graph (headrace/program.py), parsed and checked.")
      .def(
          "__init__", [](Program* self, nb::bytes data) { new (self) Program(program_from_bytes(data)); }, "data"_a,
          "Parses the bytes of a compiled graph. HeadraceError if they are not one.")
      .def_ro("max_rows", &Program::max_rows, "Rows of the largest pass.")
      .def_ro("max_out_rows", &Program::max_out_rows, "Rows whose logits one pass can return.")
      .def_ro("scratch_bytes", &Program::scratch_bytes, "What an executor commits for values and workspaces.")
      .def_prop_ro("vocab_size", [](const Program& p) { return p.values[p.logits].width; }, "Columns of the logits.");
}

void init_weights(nb::module_& m) {
  nb::class_<Weights>(m, "Weights", "The trunk: all resident tensors of a program, and its embedding table.")
      .def(nb::init<const Program&>(), "program"_a, "Reserves memory; loading commits it.")
      .def_static("resident_bytes", &Weights::resident_bytes, "program"_a, "Bytes that loading everything commits.")
      .def("load", &load_weight, "index"_a, "tensor"_a, "file"_a, "offset"_a, "nbytes"_a, "dtype"_a, "packed"_a = false,
           "crc"_a = nb::none(),
           "Reads a matrix or vector from a file: rows as files store them, or a matrix already in tile layout "
           "(packed). crc: the bytes' CRC-32C. HeadraceError names file, offset, tensor, expected and found.")
      .def(
          "set_vector",
          [](Weights& w, uint32_t index, Vector<float> data) {
            w.set_vector(index, data.data(), static_cast<uint32_t>(data.shape(0)));
          },
          "index"_a, "data"_a.noconvert(), "Sets a vector that is computed, float32 [cols].")
      .def("set_table", &Weights::set_table, "index"_a, "file"_a, "offset"_a, "stride"_a, "has_crc"_a = false,
           "Row i of the embedding lies at offset + i * stride, followed by its CRC-32C if has_crc.")
      .def("check_complete", &Weights::check_complete, "HeadraceError unless every weight was loaded or set.");
}

void init_state(nb::module_& m) {
  nb::class_<SessionState>(m, "SessionState", "What one session keeps between passes: its keys and values.")
      .def(
          "__init__",
          [](SessionState* self, const Program& program, uint32_t capacity, uint32_t kv_dtype) {
            new (self) SessionState(program, capacity, to_dtype(kv_dtype));
          },
          "program"_a, "capacity"_a, "kv_dtype"_a = 1, "Commits room for `capacity` positions; kv_dtype F16 or F32.")
      .def_static(
          "bytes",
          [](const Program& program, uint32_t capacity, uint32_t kv_dtype) {
            return SessionState::bytes(program, capacity, to_dtype(kv_dtype));
          },
          "program"_a, "capacity"_a, "kv_dtype"_a = 1, "Bytes that such a state commits.")
      .def_static(
          "part",
          [](const SessionState& room, uint32_t first, uint32_t rows, const SessionState* base, uint32_t base_length) {
            return new SessionState(room, first, rows, base, base_length);
          },
          "room"_a, "first"_a, "rows"_a, "base"_a.none() = nb::none(), "base_length"_a = 0, nb::keep_alive<0, 1>(),
          nb::keep_alive<0, 4>(),
          "A state in `rows` positions of another's memory, from `first` on (multiples of 16). With a base it "
          "continues "
          "that state's first base_length positions, and its rows also hold what of them is no whole block of 64.")
      .def_prop_ro("capacity", &SessionState::capacity, "Positions that it has room for.")
      .def_prop_ro("length", &SessionState::length, "Positions that hold a token.")
      .def("rollback", &SessionState::rollback, "length"_a, "Shortens to `length` positions.");
}

}  // namespace

void init_executor(nb::module_& m) {
  init_program(m);
  init_weights(m);
  init_state(m);
  nb::class_<CancelFlag>(m, "CancelFlag", "Ends a running pass from another thread.")
      .def(nb::init<>())
      .def("set", [](CancelFlag& flag) { flag.is_set = true; })
      .def("clear", [](CancelFlag& flag) { flag.is_set = false; })
      .def_prop_ro("is_set", [](const CancelFlag& flag) { return flag.is_set.load(); });
  nb::class_<Executor>(m, "Executor", "Replays a program. One pass runs at a time; a second caller waits.")
      .def(
          "__init__",
          [](Executor* self, const Program& program, const Weights& weights, ExpertMemory* experts,
             uint32_t num_threads, const std::vector<Program>& shorter) {
            new (self) Executor(program, weights, experts, num_threads, shorter);
          },
          "program"_a, "weights"_a, "experts"_a.none(), "num_threads"_a, "shorter"_a = std::vector<Program>(),
          nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>(),
          "num_threads counts the caller. Commits the program's scratch. shorter: the same graph compiled for fewer "
          "rows, ascending; a pass runs the first program that has room for it.")
      .def_static("overhead_bytes", &Executor::overhead_bytes, "program"_a, "num_threads"_a,
                  "Bytes that such an executor commits beside scratch, buffer_bytes() and its threads' stacks.")
      .def_static("buffer_bytes", &Executor::buffer_bytes, "program"_a, "max_rows"_a,
                  "Bytes that an executor for passes of up to max_rows rows keeps beside scratch.")
      .def("resize_scratch", &Executor::resize_scratch, "rows"_a, nb::call_guard<nb::gil_scoped_release>(),
           "Commits the scratch that passes of up to `rows` rows need and gives back the rest; larger passes are "
           "refused until it is called again. HeadraceError if the system has no memory: nothing has changed.")
      .def_prop_ro("scratch_bytes", &Executor::scratch_bytes, nb::call_guard<nb::gil_scoped_release>(),
                   "Scratch that is committed now.")
      .def(
          "run", &run_pass, "tokens"_a.noconvert(), "sequences"_a.noconvert(), "states"_a, "out_rows"_a.noconvert(),
          "logits"_a.noconvert().none(), "cancel"_a.none() = nb::none(), "routes"_a.noconvert().none() = nb::none(),
          "ids"_a.noconvert().none() = nb::none(), "weights"_a.noconvert().none() = nb::none(),
          "scores"_a.noconvert().none() = nb::none(), "per_slot"_a = false, "stream"_a = nb::none(),
          "targets"_a.noconvert().none() = nb::none(), "log_probs"_a.noconvert().none() = nb::none(),
          "One pass over n rows. tokens: int32 [n]; sequences: uint32 [n], indices into states, each sequence's rows "
          "in order; out_rows: uint32 [m], ascending; logits: float32 [m, vocab], filled. On success the states "
          "have grown; on an exception none has. routes: int32 [layers, n, top_k], ascending expert ids that replace "
          "the routers' choice, each with weight scaling / top_k. ids, weights, scores: int32, float32, float32 "
          "[layers, n, top_k], filled with the routes that were used and the routers' logits of them. "
          "targets: int32 [m], and no logits: log_probs, float32 [m], is filled with the log-probability of each after "
          "its row. "
          "HeadraceError(\"cancelled\") if `cancel` was set; a signal "
          "handler's exception (KeyboardInterrupt) is raised within some 50 ms.")
      .def_prop_ro("num_threads", &Executor::num_threads)
      .def_prop_ro(
          "vocab_size", [](const Executor& e) { return vocab_size(e.program()); }, "Columns of the logits.")
      .def_prop_ro("op_seconds", &op_seconds, "Time spent in each op since construction, by the op's name.");
}

}  // namespace headrace
