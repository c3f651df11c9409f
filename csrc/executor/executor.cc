#include "executor/executor.h"

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <chrono>
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

void run_op(const PassContext& ctx, const OpInfo& op) {
  switch (op.code) {
    case OpCode::kEmbed: return run_embed(ctx, op);
    case OpCode::kRmsNorm: return run_rms_norm(ctx, op);
    case OpCode::kQuantize: return run_quantize(ctx, op);
    case OpCode::kLinear: return run_linear(ctx, op);
    case OpCode::kRopeAngles: return run_rope_angles(ctx, op);
    case OpCode::kRope: return run_rope(ctx, op);
    case OpCode::kAttention: return run_attention(ctx, op);
    case OpCode::kAdd: return run_add(ctx, op);
    case OpCode::kRoute: return run_route(ctx, op);
    case OpCode::kExperts: return run_experts(ctx, op);
    case OpCode::kSelectRows: return run_select_rows(ctx, op);
  }
}

std::string str(uint64_t n) { return std::to_string(n); }

void check_shape(const Program& program, const Pass& pass) {
  const size_t n = pass.tokens.size();
  if (n < 1 || n > program.max_rows) throw Error("pass: " + str(n) + " rows, expected 1 to " + str(program.max_rows));
  if (pass.sequences.size() != n)
    throw Error("pass: " + str(pass.sequences.size()) + " sequences for " + str(n) + " rows");
  if (pass.out_rows.size() > program.max_out_rows)
    throw Error("pass: " + str(pass.out_rows.size()) + " rows of logits, expected at most " +
                str(program.max_out_rows));
  if (!pass.out_rows.empty() && pass.logits == nullptr) throw Error("pass: no room for logits");
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

}  // namespace

struct Executor::Impl {
  Program program;
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

  Impl(Program parsed, const Weights& w, ExpertMemory* e, uint32_t num_threads)
      : program(std::move(parsed)),
        weights(w),
        experts(e),
        kernels(headrace::kernels()),
        pool(num_threads),
        scratch(program.scratch_bytes) {
    weights.check_complete();
    check_experts(program, experts);
    size_attention_buffers(program, num_threads, buffers);
    size_expert_buffers(program, buffers);
    buffers.order.reserve(program.max_rows);
    positions.reserve(program.max_rows);
    scratch.commit();
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
  }

  void run(const Pass& pass) {
    check_shape(program, pass);
    assign_positions(pass);
    stopping = false;
    const PassContext ctx{program, weights, experts, kernels, pool, scratch.data(), buffers, pass, positions, stopping};
    for (const OpInfo& op : program.ops) {
      ctx.poll();
      const auto start = std::chrono::steady_clock::now();
      run_op(ctx, op);
      const auto spent = std::chrono::steady_clock::now() - start;
      op_ns[static_cast<uint32_t>(op.code)] +=
          static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(spent).count());
    }
    const float* logits = ctx.f32(program.logits);
    std::copy(logits, logits + pass.out_rows.size() * program.values[program.logits].width, pass.logits);
    // Nothing below throws: only a whole pass counts.
    for (size_t i = 0; i < pass.states.size(); ++i) pass.states[i]->append(lengths[i] - pass.states[i]->length());
  }
};

Executor::Executor(Program program, const Weights& weights, ExpertMemory* experts, uint32_t num_threads)
    : impl_(std::make_unique<Impl>(std::move(program), weights, experts, num_threads)) {}

Executor::~Executor() = default;

void Executor::run(const Pass& pass) {
  std::lock_guard lock(impl_->mutex);
  const DefaultFloatMode mode;
  impl_->run(pass);
}

const Program& Executor::program() const { return impl_->program; }

uint32_t Executor::num_threads() const { return impl_->pool.size(); }

std::array<uint64_t, kNumOps> Executor::op_ns() const {
  std::array<uint64_t, kNumOps> out;
  for (uint32_t i = 0; i < kNumOps; ++i) out[i] = impl_->op_ns[i].load(std::memory_order_relaxed);
  return out;
}

}  // namespace headrace
