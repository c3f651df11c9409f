#include <algorithm>
#include <numeric>

#include "executor/ops.h"
#include "experts/expert_source.h"

namespace headrace {

namespace {

// Queries (rows times heads that share a kv head) that one call of the kernel takes: its blocks of keys and values are
// converted once for all of them, and what it keeps of them stays in the L2 cache.
constexpr uint32_t kQueries = 128;
// Products with keys and values that are worth waking another thread for.
constexpr uint64_t kLeastProducts = 32 << 10;

struct AttentionOp {
  uint32_t q, k, v, y, state;
  uint32_t num_kv, per_kv, head_dim;
  uint32_t chunk_rows;  // of one kernel call

  explicit AttentionOp(const OpInfo& op)
      : q(op.inputs[0]),
        k(op.inputs[1]),
        v(op.inputs[2]),
        y(op.outputs[0]),
        state(op.states[0]),
        num_kv(static_cast<uint32_t>(op.attr_int[attr_attention::kNumKeyValueHeads])),
        per_kv(static_cast<uint32_t>(op.attr_int[attr_attention::kNumAttentionHeads]) / num_kv),
        head_dim(static_cast<uint32_t>(op.attr_int[attr_attention::kHeadDim])),
        chunk_rows(std::max(1u, kQueries / per_kv)) {}

  size_t scratch_bytes() const {
    return round_up(attend_scratch_floats(chunk_rows, per_kv, head_dim) * sizeof(float), kPage);
  }
};

const SessionState& state_of(const PassContext& ctx, uint32_t row) { return *ctx.pass.states[ctx.pass.sequences[row]]; }

// All rows' keys and values go into the states first, so that later rows of the pass see the earlier ones as stored.
// Then states that begin to continue another take over what is no whole block.
void store_rows(const PassContext& ctx, const AttentionOp& op, uint32_t n) {
  // Head by head: the rows of a thread share lines of the keys' tiles.
  ctx.each_row(n * op.num_kv, 2 * op.head_dim, [&](uint32_t item) {
    const uint32_t h = item / n, row = item % n;
    const SessionState& session = state_of(ctx, row);
    const uint32_t position = ctx.positions[row] - session.shared();
    const DType type = session.kv_type();
    const size_t at = size_t{h} * op.head_dim;
    ctx.kernels.store_key(ctx.f32(op.k, row) + at, op.head_dim, position, type, session.keys(op.state, h));
    ctx.kernels.store_kv(ctx.f32(op.v, row) + at, session.values(op.state, h) + position * row_bytes(type, op.head_dim),
                         op.head_dim, type);
  });
  std::vector<uint32_t>& starting = ctx.buffers.order;
  starting.clear();
  for (uint32_t i = 0; i < ctx.pass.states.size(); ++i) {
    const SessionState& session = *ctx.pass.states[i];
    if (session.base() != nullptr && session.length() == session.base_length()) starting.push_back(i);
  }
  ctx.each_row(static_cast<uint32_t>(starting.size()) * op.num_kv, kKeyBlock * op.head_dim, [&](uint32_t item) {
    ctx.pass.states[starting[item / op.num_kv]]->copy_rest(op.state, item % op.num_kv);
  });
}

// Rows by sequence, each sequence's in order, then cut into chunks: consecutive positions of one sequence.
void cut_into_chunks(const PassContext& ctx, const AttentionOp& op, uint32_t n) {
  const std::span<const uint32_t> sequences = ctx.pass.sequences;
  std::vector<uint32_t>& order = ctx.buffers.order;
  order.resize(n);
  std::iota(order.begin(), order.end(), 0);
  if (ctx.pass.states.size() > 1)
    std::sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) {
      return sequences[a] != sequences[b] ? sequences[a] < sequences[b] : a < b;
    });
  std::vector<uint32_t>& chunks = ctx.buffers.chunks;
  chunks.clear();
  for (uint32_t i = 0; i < n; ++i) {
    const bool goes_on = i > 0 && sequences[order[i]] == sequences[order[i - 1]] && i - chunks.back() < op.chunk_rows;
    if (!goes_on) chunks.push_back(i);
  }
  chunks.push_back(n);
}

}  // namespace

void run_attention(const PassContext& ctx, const OpInfo& info) {
  const AttentionOp op(info);
  const uint32_t n = ctx.num_rows(op.y);
  store_rows(ctx, op, n);
  cut_into_chunks(ctx, op, n);
  const std::vector<uint32_t>&order = ctx.buffers.order, &chunks = ctx.buffers.chunks;
  const uint32_t num_chunks = static_cast<uint32_t>(chunks.size() - 1);
  // Heads that share keys are divided only where there would be nothing to do for some threads.
  uint32_t parts = 1;
  while (op.num_kv * num_chunks * parts < ctx.pool.size() && parts < op.per_kv) ++parts;

  const uint64_t longest = 1 + *std::max_element(ctx.positions.begin(), ctx.positions.end());
  const uint64_t products = 2 * longest * op.per_kv * op.head_dim * n / (num_chunks * parts);
  const uint32_t grain = static_cast<uint32_t>(1 + kLeastProducts / products);
  // Head by head, so that a thread's consecutive items read the same keys and values.
  ctx.pool.parallel_for(op.num_kv * num_chunks * parts, grain, [&](uint32_t begin, uint32_t end, uint32_t thread) {
    const float* q[kQueries];
    float* y[kQueries];
    for (uint32_t item = begin; item < end; ++item) {
      ctx.poll(thread);
      const uint32_t h = item / (num_chunks * parts), part = item / num_chunks % parts, chunk = item % num_chunks;
      const uint32_t* rows = order.data() + chunks[chunk];
      const uint32_t num_rows = chunks[chunk + 1] - chunks[chunk];
      const uint32_t first_q = op.per_kv * part / parts, last_q = op.per_kv * (part + 1) / parts;
      for (uint32_t i = 0; i < num_rows; ++i) {
        const size_t at = (size_t{h} * op.per_kv + first_q) * op.head_dim;
        q[i] = ctx.f32(op.q, rows[i]) + at;
        y[i] = ctx.f32(op.y, rows[i]) + at;
      }
      const SessionState& session = state_of(ctx, rows[0]);
      KeysAndValues kv = {
          .head_dim = op.head_dim,
          .type = session.kv_type(),
          .keys = session.keys(op.state, h),
          .values = session.values(op.state, h),
          .window = static_cast<uint32_t>(info.attr_int[attr_attention::kWindow]),
          .scale = static_cast<float>(info.attr_double[attr_attention::kScale]),
          .shared = session.shared(),
      };
      if (kv.shared != 0) {
        kv.shared_keys = session.base()->keys(op.state, h);
        kv.shared_values = session.base()->values(op.state, h);
      }
      uint8_t* scratch = ctx.buffers.attention->data() + thread * op.scratch_bytes();
      ctx.kernels.attend(kv, q, last_q - first_q, num_rows, ctx.positions[rows[0]], y,
                         reinterpret_cast<float*>(scratch));
    }
  });
}

uint64_t attention_buffer_bytes(const Program& program, uint32_t num_threads) {
  size_t thread_bytes = 0;
  for (const OpInfo& op : program.ops)
    if (op.code == OpCode::kAttention) thread_bytes = std::max(thread_bytes, AttentionOp(op).scratch_bytes());
  return num_threads * thread_bytes;
}

void size_attention_buffers(const Program& program, uint32_t num_threads, OpBuffers& buffers) {
  const uint64_t bytes = attention_buffer_bytes(program, num_threads);
  if (buffers.attention == nullptr || bytes > buffers.attention->size_bytes()) {
    buffers.attention = std::make_unique<Mapping>(bytes);
    buffers.attention->commit();
  }
  buffers.chunks.reserve(program.max_rows + 1);
}

}  // namespace headrace
