#include "executor/ops.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <string>

namespace headrace {

namespace {

// A thread's share of a product is at least this much weight: below, waking another costs more than it saves.
constexpr size_t kLeastWeightBytes = 32 << 10;
// With many rows a kernel reads the same weights several times: half of a 1 MiB L2 cache for them. Also what is done
// between two polls.
constexpr size_t kPieceBytes = 512 << 10;
constexpr uint32_t kFewRows = 16;

size_t value_row_bytes(const ValueInfo& v) { return v.kind == ValueKind::kQ8 ? q8_row_bytes(v.width) : v.width * 4; }

}  // namespace

uint32_t PassContext::num_rows(uint32_t value) const {
  const Extent extent = program.values[value].extent;
  if (extent == Extent::kLogitRows && !pass.targets.empty()) return 0;
  return static_cast<uint32_t>(extent == Extent::kRows ? pass.tokens.size() : pass.out_rows.size());
}

uint8_t* PassContext::bytes(uint32_t value, uint32_t row) const {
  const ValueInfo& v = program.values[value];
  return scratch + v.offset + row * value_row_bytes(v);
}

float* PassContext::f32(uint32_t value, uint32_t row) const { return reinterpret_cast<float*>(bytes(value, row)); }

int32_t* PassContext::i32(uint32_t value, uint32_t row) const { return reinterpret_cast<int32_t*>(bytes(value, row)); }

void matmul_rows(const PassContext& ctx, const Matrix& w, const void* const* x, uint32_t n, float* const* y,
                 uint32_t tile_begin, uint32_t tile_end, uint32_t thread) {
  const uint32_t fit = static_cast<uint32_t>(kPieceBytes / tile_bytes(w.type, w.cols)) / 4 * 4;
  const uint32_t step = n > kFewRows ? std::max(fit, 4u) : tile_end - tile_begin;
  for (uint32_t tile = tile_begin; tile < tile_end; tile += step) {
    ctx.poll(thread);
    ctx.kernels.matmul(w, x, n, y, tile, std::min(tile + step, tile_end));
  }
}

// Each distinct token is read once, in the order of the file.
void run_embed(const PassContext& ctx, const OpInfo& op) {
  const uint32_t table = op.weights[0], y = op.outputs[0];
  const std::span<const int32_t> tokens = ctx.pass.tokens;
  for (int32_t token : tokens) {
    if (token < 0 || static_cast<uint32_t>(token) >= ctx.program.weights[table].rows)
      throw Error("token " + std::to_string(token) + " is outside the vocabulary of " +
                  std::to_string(ctx.program.weights[table].rows));
  }
  std::vector<uint32_t>& order = ctx.buffers.order;
  order.resize(tokens.size());
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(),
            [&](uint32_t a, uint32_t b) { return tokens[a] != tokens[b] ? tokens[a] < tokens[b] : a < b; });
  auto is_first = [&](uint32_t i) { return i == 0 || tokens[order[i]] != tokens[order[i - 1]]; };
  const uint32_t n = static_cast<uint32_t>(tokens.size());
  const uint64_t width = ctx.program.values[y].width;
  ctx.each_row(n, 4 * width, [&](uint32_t i) {
    if (is_first(i)) ctx.weights.table_row(table, static_cast<uint32_t>(tokens[order[i]]), ctx.f32(y, order[i]));
  });
  for (uint32_t i = 1; i < n; ++i) {
    if (!is_first(i)) std::memcpy(ctx.f32(y, order[i]), ctx.f32(y, order[i - 1]), width * sizeof(float));
  }
}

void run_rms_norm(const PassContext& ctx, const OpInfo& op) {
  const uint32_t x = op.inputs[0], y = op.outputs[0];
  const uint32_t width = static_cast<uint32_t>(ctx.program.values[x].width);
  const uint32_t group = static_cast<uint32_t>(op.attr_int[attr_rms_norm::kGroup]);
  const float eps = static_cast<float>(op.attr_double[attr_rms_norm::kEps]);
  const float* weight = ctx.weights.vector(op.weights[0]);
  ctx.each_row(ctx.num_rows(x), width, [&](uint32_t row) {
    ctx.kernels.rms_norm(ctx.f32(x, row), weight, ctx.f32(y, row), width, group, eps);
  });
}

void run_quantize(const PassContext& ctx, const OpInfo& op) {
  const uint32_t x = op.inputs[0], y = op.outputs[0];
  const uint32_t width = static_cast<uint32_t>(ctx.program.values[x].width);
  ctx.each_row(ctx.num_rows(x), width, [&](uint32_t row) {
    ctx.kernels.quantize(ctx.f32(x, row), width, 0, width / kQuantBlock, ctx.bytes(y, row));
  });
}

// Products of one x, such as queries, keys and values, are one job: threads meet once, not once a matrix.
void run_linears(const PassContext& ctx, std::span<const OpInfo> ops) {
  const uint32_t x = ops[0].inputs[0], n = ctx.num_rows(ops[0].outputs[0]);
  if (n == 0) return;
  RowPointers& rows = ctx.buffers.rows;
  uint32_t num_all_tiles = 0;
  for (uint32_t row = 0; row < n; ++row) rows.x[row] = ctx.bytes(x, row);
  for (size_t i = 0; i < ops.size(); ++i) {
    for (uint32_t row = 0; row < n; ++row) rows.y[i * n + row] = ctx.f32(ops[i].outputs[0], row);
    num_all_tiles += num_tiles(ctx.weights.matrix(ops[i].weights[0]).rows);
  }
  const Matrix first = ctx.weights.matrix(ops[0].weights[0]);
  const uint32_t grain = static_cast<uint32_t>(1 + kLeastWeightBytes / (tile_bytes(first.type, first.cols) * n));
  ctx.pool.parallel_for(num_all_tiles, grain, [&](uint32_t begin, uint32_t end, uint32_t thread) {
    uint32_t tile = 0;  // the first of the matrix, in the row of all
    for (size_t i = 0; i < ops.size() && tile < end; ++i) {
      const Matrix w = ctx.weights.matrix(ops[i].weights[0]);
      const uint32_t tiles = num_tiles(w.rows);
      const uint32_t from = std::max(begin, tile), to = std::min(end, tile + tiles);
      if (from < to) matmul_rows(ctx, w, rows.x.data(), n, rows.y.data() + i * n, from - tile, to - tile, thread);
      tile += tiles;
    }
  });
}

std::span<const OpInfo> linears_from(const Program& program, size_t first) {
  const std::span<const OpInfo> ops(program.ops);
  const auto belongs = [&](size_t i) {
    if (ops[i].code != OpCode::kLinear || ops[i].inputs[0] != ops[first].inputs[0]) return false;
    // A value that nobody reads may share its memory with a later one.
    for (size_t j = first; j < i; ++j)
      if (overlap(program, ops[j].outputs[0], ops[i].outputs[0])) return false;
    return true;
  };
  size_t n = 0;
  while (first + n < ops.size() && n < kMostLinears && belongs(first + n)) ++n;
  return ops.subspan(first, n);
}

void run_rope_angles(const PassContext& ctx, const OpInfo& op) {
  const uint32_t y = op.outputs[0], half = static_cast<uint32_t>(ctx.program.values[y].width / 2);
  const float* inv_freq = ctx.weights.vector(op.weights[0]);
  ctx.each_row(ctx.num_rows(y), 64 * half,
               [&](uint32_t row) { ctx.kernels.rope_angles(ctx.positions[row], inv_freq, half, ctx.f32(y, row)); });
}

void run_rope(const PassContext& ctx, const OpInfo& op) {
  const uint32_t x = op.inputs[0], angles = op.inputs[1], y = op.outputs[0];
  const uint32_t width = static_cast<uint32_t>(ctx.program.values[x].width);
  const uint32_t head_dim = static_cast<uint32_t>(op.attr_int[attr_rope::kHeadDim]);
  const uint32_t rotary = static_cast<uint32_t>(ctx.program.values[angles].width);
  const RopeStyle style = static_cast<RopeStyle>(op.attr_int[attr_rope::kStyle]);
  ctx.each_row(ctx.num_rows(x), width, [&](uint32_t row) {
    if (ctx.f32(y, row) != ctx.f32(x, row)) std::memcpy(ctx.f32(y, row), ctx.f32(x, row), width * sizeof(float));
    ctx.kernels.rope(ctx.f32(y, row), ctx.f32(angles, row), width / head_dim, head_dim, rotary, style);
  });
}

void run_add(const PassContext& ctx, const OpInfo& op) {
  const uint32_t a = op.inputs[0], b = op.inputs[1], y = op.outputs[0];
  const uint32_t width = static_cast<uint32_t>(ctx.program.values[a].width);
  ctx.each_row(ctx.num_rows(a), width,
               [&](uint32_t row) { ctx.kernels.add(ctx.f32(a, row), ctx.f32(b, row), ctx.f32(y, row), width); });
}

void run_route(const PassContext& ctx, const OpInfo& op) {
  const uint32_t logits = op.inputs[0], ids = op.outputs[0], weights = op.outputs[1];
  const uint32_t num_experts = static_cast<uint32_t>(ctx.program.values[logits].width);
  const uint32_t top_k = static_cast<uint32_t>(op.attr_int[attr_route::kTopK]);
  const Scoring scoring = static_cast<Scoring>(op.attr_int[attr_route::kScoring]);
  const bool normalize = op.attr_int[attr_route::kNormalize] != 0;
  const double scaling = op.attr_double[attr_route::kScaling];
  const float forced_weight = static_cast<float>(scaling / top_k);
  const RoutingTap& tap = ctx.pass.routing;
  const bool sees_all_rows = ctx.program.values[logits].extent == Extent::kRows;
  const size_t layer_begin = static_cast<size_t>(op.attr_int[attr_route::kLayer]) * ctx.pass.tokens.size() * top_k;
  ctx.each_row(ctx.num_rows(logits), 16 * num_experts, [&](uint32_t row) {
    int32_t* row_ids = ctx.i32(ids, row);
    float* row_weights = ctx.f32(weights, row);
    const float* row_logits = ctx.f32(logits, row);
    ctx.kernels.route(row_logits, num_experts, top_k, scoring, normalize, static_cast<float>(scaling), row_ids,
                      row_weights);
    const size_t at = layer_begin + size_t{sees_all_rows ? row : ctx.pass.out_rows[row]} * top_k;
    if (!tap.forced.empty()) {
      std::copy_n(&tap.forced[at], top_k, row_ids);
      std::fill_n(row_weights, top_k, forced_weight);
    }
    if (!tap.ids.empty()) {
      std::copy_n(row_ids, top_k, &tap.ids[at]);
      std::copy_n(row_weights, top_k, &tap.weights[at]);
      for (uint32_t j = 0; j < top_k; ++j) tap.scores[at + j] = row_logits[row_ids[j]];
    }
  });
}

void run_select_rows(const PassContext& ctx, const OpInfo& op) {
  const uint32_t x = op.inputs[0], y = op.outputs[0];
  const size_t bytes = value_row_bytes(ctx.program.values[x]);
  for (uint32_t row = 0; row < ctx.num_rows(y); ++row)
    std::memcpy(ctx.bytes(y, row), ctx.bytes(x, ctx.pass.out_rows[row]), bytes);
}

}  // namespace headrace
