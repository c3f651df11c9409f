#include "executor/executor.h"

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <chrono>
#include <cmath>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "executor/mapping.h"
#include "executor/ops.h"
#include "executor/thread_pool.h"
#include "support/error.h"

namespace headrace {

namespace {

// ops: one, or linears of one x.
void run_ops(const PassContext& ctx, std::span<const OpInfo> ops) {
  const OpInfo& op = ops[0];
  switch (op.code) {
    case OpCode::kEmbed: return run_embed(ctx, op);
    case OpCode::kRmsNorm: return run_rms_norm(ctx, op);
    case OpCode::kQuantize: return run_quantize(ctx, op);
    case OpCode::kLinear: return run_linears(ctx, ops);
    case OpCode::kRopeAngles: return run_rope_angles(ctx, op);
    case OpCode::kRope: return run_rope(ctx, op);
    case OpCode::kAttention: return run_attention(ctx, op);
    case OpCode::kAdd: return run_add(ctx, op);
    case OpCode::kRoute: return run_route(ctx, op);
    case OpCode::kExperts: return run_experts(ctx, op);
    case OpCode::kSelectRows: return run_select_rows(ctx, op);
    case OpCode::kOutput: return run_output(ctx, op);
  }
}

std::string str(uint64_t n) { return std::to_string(n); }

void check_targets(const Program& program, const Pass& pass) {
  if (program.log_probs == kNoValue) throw Error("pass: targets, but the program gives no log-probabilities");
  if (pass.targets.size() != pass.out_rows.size() || pass.log_probs == nullptr)
    throw Error("pass: " + str(pass.targets.size()) + " targets for " + str(pass.out_rows.size()) + " rows" +
                (pass.log_probs == nullptr ? ", and no room for log-probabilities" : ""));
  const uint64_t vocab = program.values[program.logits].width;
  for (int32_t target : pass.targets)
    if (target < 0 || static_cast<uint64_t>(target) >= vocab)
      throw Error("pass: target " + std::to_string(target) + " is outside the vocabulary of " + str(vocab));
}

void check_shape(const Program& program, const Pass& pass) {
  const size_t n = pass.tokens.size();
  if (n < 1 || n > program.max_rows) throw Error("pass: " + str(n) + " rows, expected 1 to " + str(program.max_rows));
  if (pass.sequences.size() != n)
    throw Error("pass: " + str(pass.sequences.size()) + " sequences for " + str(n) + " rows");
  if (!pass.targets.empty()) {
    check_targets(program, pass);
  } else {
    if (pass.out_rows.size() > program.max_out_rows)
      throw Error("pass: " + str(pass.out_rows.size()) + " rows of logits, expected at most " +
                  str(program.max_out_rows));
    if (!pass.out_rows.empty() && pass.logits == nullptr) throw Error("pass: no room for logits");
  }
  for (size_t i = 0; i < pass.out_rows.size(); ++i) {
    if (pass.out_rows[i] >= n || (i > 0 && pass.out_rows[i] <= pass.out_rows[i - 1]))
      throw Error("pass: output row " + str(pass.out_rows[i]) + " of " + str(n) + " rows, expected ascending rows");
  }
  for (size_t i = 0; i < pass.states.size(); ++i) {
    const SessionState* state = pass.states[i];
    if (state == nullptr || !state->fits(program)) throw Error("pass: state " + str(i) + " is of another model");
    if (std::find(pass.states.begin(), pass.states.begin() + i, state) != pass.states.begin() + i)
      throw Error("pass: state " + str(i) + " is given twice");
  }
}

// Everything about the tap that could be wrong, before anything runs.
void check_routing(const Program& program, const Pass& pass) {
  const RoutingTap& tap = pass.routing;
  const bool is_captured = !tap.ids.empty() || !tap.weights.empty() || !tap.scores.empty();
  if (tap.forced.empty() && !is_captured) return;
  const RoutingShape shape = routing_shape(program);
  const size_t n = pass.tokens.size(), num_routes = shape.num_layers * n * shape.top_k;
  for (size_t size : {tap.forced.size(), tap.ids.size(), tap.weights.size(), tap.scores.size()}) {
    if (size != num_routes && (size != 0 || num_routes == 0))
      throw Error("pass: " + str(size) + " routes, expected " + str(shape.num_layers) + " layers x " + str(n) +
                  " rows x " + str(shape.top_k) + " experts");
  }
  if (is_captured && (tap.ids.empty() || tap.weights.empty() || tap.scores.empty()))
    throw Error("pass: routing is captured whole: give room for ids, weights and scores");
  if (is_captured && !shape.all_rows && pass.out_rows.size() != n)
    throw Error("pass: routing of " + str(n) + " rows is asked for, but the last layer routes only the " +
                str(pass.out_rows.size()) + " whose logits are wanted; build the graph with route_all_rows");
  for (size_t i = 0; i < tap.forced.size(); ++i) {
    const int32_t id = tap.forced[i];
    const bool ascends = i % shape.top_k == 0 || id > tap.forced[i - 1];
    if (id < 0 || static_cast<uint32_t>(id) >= shape.num_experts || !ascends)
      throw Error("pass: layer " + str(i / shape.top_k / n) + ", row " + str(i / shape.top_k % n) +
                  ": route to expert " + std::to_string(id) + ", expected ascending ids below " +
                  str(shape.num_experts));
  }
}

// Round to nearest, subnormals kept, whatever another library set for the calling thread: the bits depend on it.
class DefaultFloatMode {
 public:
  DefaultFloatMode() {
    std::fegetenv(&before_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloatMode() { std::fesetenv(&before_); }

 private:
  std::fenv_t before_;
};

// A program and its ops in order: one each, or linears of one x.
struct Replay {
  Program program;
  std::vector<std::span<const OpInfo>> jobs;

  explicit Replay(Program parsed) : program(std::move(parsed)) {
    for (size_t i = 0; i < program.ops.size(); i += jobs.back().size()) {
      const std::span<const OpInfo> linears = linears_from(program, i);
      jobs.push_back(linears.empty() ? std::span(&program.ops[i], 1) : linears);
    }
  }
};

// Programs of one graph share weights, states and logits.
void check_shorter(const Program& shorter, const Program& longer) {
  const auto same_weight = [](const WeightInfo& a, const WeightInfo& b) {
    return a.role == b.role && a.dtype == b.dtype && a.rows == b.rows && a.cols == b.cols;
  };
  const auto same_state = [](const StateInfo& a, const StateInfo& b) {
    return a.kind == b.kind && a.num_heads == b.num_heads && a.head_dim == b.head_dim;
  };
  if (!std::ranges::equal(shorter.weights, longer.weights, same_weight) ||
      !std::ranges::equal(shorter.states, longer.states, same_state) ||
      shorter.values[shorter.logits].width != longer.values[longer.logits].width ||
      (shorter.log_probs == kNoValue) != (longer.log_probs == kNoValue))
    throw Error("executor: the program for " + str(shorter.max_rows) + " rows is of another model than that for " +
                str(longer.max_rows));
  if (shorter.max_rows >= longer.max_rows || shorter.scratch_bytes > longer.scratch_bytes)
    throw Error("executor: expected programs for ever more rows, found one for " + str(shorter.max_rows) +
                " rows and " + str(shorter.scratch_bytes) + " bytes of scratch before one for " + str(longer.max_rows) +
                " rows and " + str(longer.scratch_bytes));
}

// Where more of a layer's experts are expected to have no routes, reading them for nothing takes longer than reading
// would have to wait for the routes (docs/prefill.md).
constexpr double kMostMissed = 0.25;

}  // namespace

struct Executor::Impl {
  const std::vector<Replay> replays;  // by rows, ascending
  const Program& program;             // the last of them
  const Weights& weights;
  ExpertMemory* experts;
  const Kernels& kernels;
  ThreadPool pool;
  Mapping scratch;
  OpBuffers buffers;
  std::vector<uint32_t> positions;  // [rows]
  std::vector<uint32_t> lengths;    // [states] after the pass
  std::atomic<bool> stopping{false};
  std::array<std::atomic<uint64_t>, kNumOps> op_ns{};
  std::mutex mutex;  // one pass at a time

  static std::vector<Replay> make_replays(Program program, std::vector<Program> shorter) {
    shorter.push_back(std::move(program));
    for (size_t i = 1; i < shorter.size(); ++i) check_shorter(shorter[i - 1], shorter[i]);
    std::vector<Replay> replays;
    replays.reserve(shorter.size());  // jobs point into programs
    for (Program& p : shorter) replays.emplace_back(std::move(p));
    return replays;
  }

  Impl(Program parsed, const Weights& w, ExpertMemory* e, uint32_t num_threads, std::vector<Program> shorter)
      : replays(make_replays(std::move(parsed), std::move(shorter))),
        program(replays.back().program),
        weights(w),
        experts(e),
        kernels(headrace::kernels()),
        pool(num_threads),
        scratch(program.scratch_bytes) {
    weights.check_complete();
    for (const Replay& replay : replays) {
      check_experts(replay.program, experts);
      size_attention_buffers(replay.program, num_threads, buffers);
      size_expert_buffers(replay.program, buffers);
    }
    size_output_buffers(program, num_threads, buffers);
    buffers.order.reserve(program.max_rows);
    positions.reserve(program.max_rows);
    scratch.commit();
  }

  // The shortest program that has room, else the longest.
  const Replay& replay_for(size_t rows, size_t logit_rows) const {
    return *std::ranges::find_if(replays, [&](const Replay& r) {
      return &r == &replays.back() || (rows <= r.program.max_rows && logit_rows <= r.program.max_out_rows);
    });
  }

  // The i-th row of a sequence continues its state at length() + i.
  void assign_positions(const Pass& pass) {
    lengths.clear();
    for (const SessionState* state : pass.states) lengths.push_back(state->length());
    positions.clear();
    for (uint32_t sequence : pass.sequences) {
      if (sequence >= pass.states.size())
        throw Error("pass: a row of sequence " + str(sequence) + ", but only " + str(pass.states.size()) + " states");
      if (lengths[sequence] >= pass.states[sequence]->capacity())
        throw Error("pass: sequence " + str(sequence) + " leaves its context of " +
                    str(pass.states[sequence]->capacity()) + " positions; ask for a larger one");
      positions.push_back(lengths[sequence]++);
    }
    for (size_t i = 0; i < pass.states.size(); ++i) check_base(pass, i);
  }

  // What a state continues is there by the time of its rows' attention, if it has any.
  void check_base(const Pass& pass, size_t i) const {
    const SessionState* base = pass.states[i]->base();
    if (base == nullptr || lengths[i] == pass.states[i]->length()) return;
    const size_t at = std::find(pass.states.begin(), pass.states.end(), base) - pass.states.begin();
    const uint32_t length = at < lengths.size() ? lengths[at] : base->length();
    if (length < pass.states[i]->base_length())
      throw Error("pass: state " + str(i) + " continues " + str(pass.states[i]->base_length()) +
                  " positions of a state that holds " + str(length));
  }

  // Layers whose experts may be read before their routes are known: those of which three quarters are expected to be
  // routed to, if routes were drawn evenly.
  std::vector<bool> layers_to_read_early(const Pass& pass) const {
    std::vector<bool> layers(experts->source().layers.size(), false);
    for (const OpInfo& op : program.ops) {
      if (op.code != OpCode::kExperts) continue;
      const bool all_rows = program.values[op.outputs[0]].extent == Extent::kRows;
      const double rows = static_cast<double>(all_rows ? pass.tokens.size() : pass.out_rows.size());
      const double top_k = static_cast<double>(program.values[op.inputs[1]].width);
      const double missed = 1 - top_k / static_cast<double>(op.attr_int[attr_experts::kNumExperts]);
      layers[static_cast<size_t>(op.attr_int[attr_experts::kLayer])] = std::pow(missed, rows) <= kMostMissed;
    }
    return layers;
  }

  void run(const Pass& pass) {
    check_shape(program, pass);
    check_routing(program, pass);
    assign_positions(pass);
    stopping = false;
    const Replay& replay = replay_for(pass.tokens.size(), pass.targets.empty() ? pass.out_rows.size() : 0);
    if (replay.program.scratch_bytes > scratch.committed_bytes())
      throw Error("pass: " + str(pass.tokens.size()) + " rows need " + str(replay.program.scratch_bytes) +
                  " bytes of scratch, found " + str(scratch.committed_bytes()) + "; call resize_scratch() first");
    struct EndStream {
      ExpertMemory* experts;
      ~EndStream() {
        if (experts) experts->end_stream();
      }
    } end_stream{nullptr};
    if (pass.stream && experts != nullptr) {
      experts->begin_stream(pass.stream->options, layers_to_read_early(pass), pass.stream->is_first);
      end_stream.experts = experts;
    }
    const PassContext ctx{replay.program, weights, experts, kernels,   pool,
                          scratch.data(), buffers, pass,    positions, stopping};
    for (const std::span<const OpInfo> ops : replay.jobs) {
      ctx.poll();
      const auto start = std::chrono::steady_clock::now();
      run_ops(ctx, ops);
      const auto spent = std::chrono::steady_clock::now() - start;
      op_ns[static_cast<uint32_t>(ops[0].code)] +=
          static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(spent).count());
    }
    const bool is_scored = !pass.targets.empty();
    const uint32_t end = is_scored ? replay.program.log_probs : replay.program.logits;
    const float* from = ctx.f32(end);
    std::copy_n(from, ctx.num_rows(end) * replay.program.values[end].width, is_scored ? pass.log_probs : pass.logits);
    // Nothing below throws: only a whole pass counts.
    for (size_t i = 0; i < pass.states.size(); ++i) pass.states[i]->append(lengths[i] - pass.states[i]->length());
  }
};

Executor::Executor(Program program, const Weights& weights, ExpertMemory* experts, uint32_t num_threads,
                   std::vector<Program> shorter)
    : impl_(std::make_unique<Impl>(std::move(program), weights, experts, num_threads, std::move(shorter))) {}

Executor::~Executor() = default;

uint64_t Executor::overhead_bytes(const Program& program, uint32_t num_threads) {
  return attention_buffer_bytes(program, num_threads) + output_buffer_bytes(program, num_threads);
}

uint64_t Executor::buffer_bytes(const Program& program, uint32_t max_rows) {
  return max_rows * (sizeof(uint32_t) * 3) + expert_buffer_bytes(program, max_rows);  // positions, order, chunks
}

void Executor::resize_scratch(uint32_t rows) {
  std::lock_guard lock(impl_->mutex);
  impl_->scratch.commit(impl_->replay_for(rows, 0).program.scratch_bytes);
}

uint64_t Executor::scratch_bytes() const {
  std::lock_guard lock(impl_->mutex);
  return impl_->scratch.committed_bytes();
}

void Executor::run(const Pass& pass) {
  std::lock_guard lock(impl_->mutex);
  const DefaultFloatMode mode;
  impl_->run(pass);
}

const Program& Executor::program() const { return impl_->program; }

RoutingShape Executor::routing() const { return routing_shape(impl_->program); }

uint32_t Executor::num_threads() const { return impl_->pool.size(); }

std::array<uint64_t, kNumOps> Executor::op_ns() const {
  std::array<uint64_t, kNumOps> out;
  for (uint32_t i = 0; i < kNumOps; ++i) out[i] = impl_->op_ns[i].load(std::memory_order_relaxed);
  return out;
}

}  // namespace headrace
