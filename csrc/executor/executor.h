// Replays a Program over the rows of one pass.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "executor/program.h"
#include "executor/state.h"
#include "executor/weights.h"
#include "experts/expert_memory.h"

namespace headrace {

// What routing is told and asked in one pass. Each array is [layers, n, top_k] or empty, layers as the program's routes
// number them.
struct RoutingTap {
  // Expert ids, ascending in a row, that replace the router's choice. Routers are computed all the same, so that a pass
  // takes its time; every weight is the route's scaling / top_k.
  std::span<const int32_t> forced;
  // Filled with what was used, all or none of the three: ids, their weights, and what the router gave them (logits).
  std::span<int32_t> ids;
  std::span<float> weights, scores;
};

// How a prompt's pass reads its experts (docs/prefill.md).
struct StreamedPass {
  StreamOptions options;
  bool is_first = true;  // of its prompt
};

// A row is (token, sequence, position). Rows of one sequence are in order and continue its state: the i-th row of
// sequence s in the pass has position state[s]->length() + i. A pass may hold rows of several sequences.
struct Pass {
  std::span<const int32_t> tokens;      // [n], 1 <= n <= max_rows
  std::span<const uint32_t> sequences;  // [n], index into states
  std::span<SessionState* const> states;
  std::span<const uint32_t> out_rows;  // ascending rows whose logits or targets are asked for, may be empty
  float* logits = nullptr;             // [out_rows.size(), vocab], at most max_out_rows
  std::function<bool()>
      should_stop;  // polled between ops, between batches of experts, and at least every 20 ms of waiting
  RoutingTap routing = {};
  // Each route reads its expert's weights for itself (MoESpec's per-slot kernel), instead of each distinct expert's
  // being read once for all its routes. The same bits.
  bool per_slot = false;
  std::optional<StreamedPass> stream = {};  // none: experts are read as layers ask for them
  // [out_rows.size()]: the token whose log-probability is wanted after each of out_rows, instead of logits, of which
  // none then exist whole; any number of rows.
  std::span<const int32_t> targets = {};
  float* log_probs = nullptr;  // [out_rows.size()]
};

class Executor {
 public:
  // weights and experts outlive the executor. Scratch is mapped and committed here. kernels: by HEADRACE_ISA.
  // shorter: the same graph compiled for fewer rows, ascending. A pass runs the first program that has room for it.
  Executor(Program program, const Weights& weights, ExpertMemory* experts, uint32_t num_threads,
           std::vector<Program> shorter = {});
  ~Executor();

  // What an executor of so many threads commits beside Program::scratch_bytes, buffer_bytes and its threads' stacks.
  static uint64_t overhead_bytes(const Program& program, uint32_t num_threads);
  // What an executor keeps for passes of up to so many rows beside scratch.
  static uint64_t buffer_bytes(const Program& program, uint32_t max_rows);

  // Commits the scratch that passes of up to `rows` rows need, and gives back what only larger ones do. Until it is
  // called again larger passes are refused. On an exception nothing has changed.
  void resize_scratch(uint32_t rows);
  uint64_t scratch_bytes() const;  // committed now

  // One pass; other callers wait for it. On success every state has grown by its rows. On an exception no state has,
  // and the next pass may run.
  void run(const Pass& pass);

  const Program& program() const;
  // What a pass's RoutingTap must fit. Error for a program that none can fit.
  RoutingShape routing() const;
  uint32_t num_threads() const;
  // Time spent per op code since construction, for reports. Any thread, also during a pass.
  std::array<uint64_t, kNumOps> op_ns() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace headrace
