#include <algorithm>

#include "executor/ops.h"

namespace headrace {

namespace {

struct Heads {
  uint32_t num_kv, per_kv, head_dim;
  explicit Heads(const OpInfo& op)
      : num_kv(static_cast<uint32_t>(op.attr_int[attr_attention::kNumKeyValueHeads])),
        per_kv(static_cast<uint32_t>(op.attr_int[attr_attention::kNumAttentionHeads]) / num_kv),
        head_dim(static_cast<uint32_t>(op.attr_int[attr_attention::kHeadDim])) {}
};

size_t scratch_floats(const Heads& heads) { return size_t{heads.per_kv} * (heads.head_dim + 34); }

SessionState& state_of(const PassContext& ctx, uint32_t row) { return *ctx.pass.states[ctx.pass.sequences[row]]; }

// All rows' keys and values go into the states first, so that later rows of the pass see the earlier ones as stored.
void store_rows(const PassContext& ctx, const OpInfo& op, const Heads& heads) {
  const uint32_t k = op.inputs[1], v = op.inputs[2], state = op.states[0];
  ctx.each_row(ctx.num_rows(k), 2 * uint64_t{heads.num_kv} * heads.head_dim, [&](uint32_t row) {
    const SessionState& session = state_of(ctx, row);
    const size_t at = ctx.positions[row] * row_bytes(session.kv_type(), heads.head_dim);
    for (uint32_t h = 0; h < heads.num_kv; ++h) {
      const size_t from = size_t{h} * heads.head_dim;
      ctx.kernels.store_kv(ctx.f32(k, row) + from, session.keys(state, h) + at, heads.head_dim, session.kv_type());
      ctx.kernels.store_kv(ctx.f32(v, row) + from, session.values(state, h) + at, heads.head_dim, session.kv_type());
    }
  });
}

void attend_row(const PassContext& ctx, const OpInfo& op, const Heads& heads, uint32_t row, uint32_t h,
                float* scratch) {
  const SessionState& session = state_of(ctx, row);
  const uint32_t last = ctx.positions[row];
  const int64_t window = op.attr_int[attr_attention::kWindow];
  const uint32_t first = window == 0 || last < window ? 0 : static_cast<uint32_t>(last - window + 1);
  const size_t at = size_t{h} * heads.per_kv * heads.head_dim;
  ctx.kernels.attend(ctx.f32(op.inputs[0], row) + at, heads.per_kv, heads.head_dim, session.keys(op.states[0], h),
                     session.values(op.states[0], h), session.kv_type(), heads.head_dim, first, last,
                     static_cast<float>(op.attr_double[attr_attention::kScale]), ctx.f32(op.outputs[0], row) + at,
                     scratch);
}

// Products with keys and values that are worth waking another thread for.
constexpr uint64_t kLeastProducts = 32 << 10;

}  // namespace

void run_attention(const PassContext& ctx, const OpInfo& op) {
  const Heads heads(op);
  store_rows(ctx, op, heads);
  const uint32_t n = ctx.num_rows(op.outputs[0]);
  const uint64_t longest = 1 + *std::max_element(ctx.positions.begin(), ctx.positions.end());
  const uint64_t products = 2 * longest * heads.per_kv * heads.head_dim;
  const uint32_t grain = static_cast<uint32_t>(1 + kLeastProducts / products);
  // Head by head, so that a thread's consecutive items read the same keys and values.
  ctx.pool.parallel_for(n * heads.num_kv, grain, [&](uint32_t begin, uint32_t end, uint32_t thread) {
    for (uint32_t item = begin; item < end; ++item) {
      ctx.poll(thread);
      attend_row(ctx, op, heads, item % n, item / n, ctx.buffers.attention[thread].data());
    }
  });
}

void size_attention_buffers(const Program& program, uint32_t num_threads, OpBuffers& buffers) {
  size_t floats = 0;
  for (const OpInfo& op : program.ops)
    if (op.code == OpCode::kAttention) floats = std::max(floats, scratch_floats(Heads(op)));
  buffers.attention.assign(num_threads, std::vector<float>(floats));
}

}  // namespace headrace
