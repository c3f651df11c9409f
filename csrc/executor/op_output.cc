// The model's end: logits, or the log-probability of one token a row without ever holding a row of logits.
#include <algorithm>

#include "executor/ops.h"
#include "experts/expert_source.h"

namespace headrace {

namespace {

// Log-probabilities take the vocabulary in pieces of so many columns, whose weights stay in the L2 cache while all rows
// of a batch meet them. The pieces are part of the bits; what follows them is not.
constexpr uint32_t kPieceCols = 256;
constexpr uint32_t kBatchRows = 256;   // rows that share one reading of the whole matrix
constexpr uint32_t kProductRows = 64;  // rows of one product

struct OutputOp {
  uint32_t x, weight, log_probs;
  uint32_t vocab, num_pieces;

  OutputOp(const Program& program, const OpInfo& op)
      : x(op.inputs[0]),
        weight(op.weights[0]),
        log_probs(op.outputs[1]),
        vocab(program.weights[weight].rows),
        num_pieces((vocab + kPieceCols - 1) / kPieceCols) {}

  // Of each thread, logits; then of each row of a batch, the pieces' maxima and sums.
  static constexpr size_t kStride = kPieceCols + 16;  // no power of two: rows would meet in the L1 cache
  static constexpr size_t kThreadFloats = kProductRows * kStride;
  size_t buffer_bytes(uint32_t num_threads) const {
    return round_up(sizeof(float) * (num_threads * kThreadFloats + size_t{2} * kBatchRows * num_pieces), kPage);
  }
};

class LogProbs {
 public:
  LogProbs(const PassContext& ctx, const OutputOp& op)
      : ctx_(ctx),
        op_(op),
        matrix_(ctx.weights.matrix(op.weight)),
        logits_(reinterpret_cast<float*>(ctx.buffers.output->data())),
        maxima_(logits_ + ctx.pool.size() * OutputOp::kThreadFloats),
        sums_(maxima_ + size_t{kBatchRows} * op.num_pieces) {}

  // Rows [first, first + n) of those that have a target.
  void run_batch(uint32_t first, uint32_t n) {
    ctx_.pool.parallel_for(op_.num_pieces, 1, [&](uint32_t begin, uint32_t end, uint32_t thread) {
      for (uint32_t piece = begin; piece < end; ++piece)
        for (uint32_t row = 0; row < n; row += kProductRows)
          take_piece(piece, first, row, std::min(kProductRows, n - row), thread);
    });
    ctx_.each_row(n, 32 * op_.num_pieces, [&](uint32_t row) {
      float* y = ctx_.f32(op_.log_probs, first + row);
      const size_t at = size_t{row} * op_.num_pieces;
      *y = ctx_.kernels.log_prob(*y, maxima_ + at, sums_ + at, op_.num_pieces);
    });
  }

 private:
  // One piece of the logits of rows [first + row, first + row + n): its maximum and sum, and the target's logit if it
  // is there, which waits in the place of the result.
  void take_piece(uint32_t piece, uint32_t first, uint32_t row, uint32_t n, uint32_t thread) {
    const uint32_t col = piece * kPieceCols, cols = std::min(kPieceCols, op_.vocab - col);
    const Matrix part = {matrix_.type, cols, matrix_.cols,
                         matrix_.data + col / kTileRows * tile_bytes(matrix_.type, matrix_.cols)};
    const void* x[kProductRows];
    float* y[kProductRows];
    for (uint32_t i = 0; i < n; ++i) {
      x[i] = ctx_.bytes(op_.x, first + row + i);
      y[i] = logits_ + thread * OutputOp::kThreadFloats + i * OutputOp::kStride;
    }
    matmul_rows(ctx_, part, x, n, y, 0, num_tiles(cols), thread);
    for (uint32_t i = 0; i < n; ++i) {
      const size_t at = size_t{row + i} * op_.num_pieces + piece;
      ctx_.kernels.sum_exp(y[i], cols, maxima_ + at, sums_ + at);
      const uint32_t target = static_cast<uint32_t>(ctx_.pass.targets[first + row + i]);
      if (target - col < cols) *ctx_.f32(op_.log_probs, first + row + i) = y[i][target - col];
    }
  }

  const PassContext& ctx_;
  const OutputOp& op_;
  const Matrix matrix_;
  float *logits_, *maxima_, *sums_;
};

}  // namespace

void run_output(const PassContext& ctx, const OpInfo& info) {
  if (ctx.pass.targets.empty()) return run_linears(ctx, {&info, 1});
  const OutputOp op(ctx.program, info);
  LogProbs log_probs(ctx, op);
  const uint32_t n = ctx.num_rows(op.log_probs);
  for (uint32_t row = 0; row < n; row += kBatchRows) log_probs.run_batch(row, std::min(kBatchRows, n - row));
}

uint64_t output_buffer_bytes(const Program& program, uint32_t num_threads) {
  uint64_t bytes = 0;
  for (const OpInfo& op : program.ops)
    if (op.code == OpCode::kOutput) bytes = OutputOp(program, op).buffer_bytes(num_threads);
  return bytes;
}

void size_output_buffers(const Program& program, uint32_t num_threads, OpBuffers& buffers) {
  buffers.output = std::make_unique<Mapping>(output_buffer_bytes(program, num_threads));
  buffers.output->commit();
}

}  // namespace headrace
