// The kernels of one instruction set, as a table of functions. Every table gives the same bits (invariant 2): lanes,
// order of sums and rounding are part of each function's definition below, and exp, sin and cos are our own.
//
// Rules that hold for all: fused multiply-adds are explicit and correctly rounded (std::fma where the hardware has
// none), no contraction, no fast-math. A "lane sum" over n floats is: 16 lanes, lane i takes elements i, i+16, ... in
// ascending order (absent elements are 0 and still added), then lanes are summed as a tree: 8+8, 4+4, 2+2, 1+1
// (lane i with lane i+8, then i+4, i+2, i+1). Pointers need no alignment unless a function says so.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/dtype.h"

namespace headrace {

// A weight matrix in tile layout. `data` is 64-byte aligned. Tile t covers rows 16t..16t+15.
struct Matrix {
  DType type = DType::kF32;
  uint32_t rows = 0;
  uint32_t cols = 0;
  const uint8_t* data = nullptr;
};

enum class RopeStyle : uint32_t { kNeox = 0, kNorm = 1 };  // pairs (i, i + rotary/2) / (2i, 2i+1)
enum class Scoring : uint32_t { kSoftmax = 0 };

// What attention with one kv head reads. A row at position p sees keys [max(0, p - window + 1), p], all where window is
// 0.
struct KeysAndValues {
  uint32_t head_dim = 0;
  DType type = DType::kF16;      // or F32
  const void* keys = nullptr;    // as store_key wrote them: tile layout, rows are positions, from `shared` on
  const void* values = nullptr;  // [positions from `shared` on, head_dim]
  uint32_t window = 0;
  float scale = 1.0f;
  uint32_t shared = 0;  // positions before this one, a multiple of 64, lie here instead
  const void* shared_keys = nullptr;
  const void* shared_values = nullptr;
};

constexpr uint32_t kKeyBlock = 64;

constexpr size_t attend_scratch_floats(size_t n, size_t num_q, size_t head_dim) {
  // A block of keys and of values as floats; for each row and head: scores, 16 lanes of sums, query, accumulator,
  // maximum.
  return 2 * kKeyBlock * head_dim + n * num_q * (kKeyBlock + 16 + 2 * head_dim + 1);
}

struct Kernels {
  const char* isa;

  // y[t][r] = sum over k of w[r, k] * x[t][k], for t < n and the rows r < w.rows of tiles [tile_begin, tile_end).
  // x[t] points at a q8 row (dtype.h) for quantized types, at w.cols floats otherwise.
  // Quantized: per block of 32 in ascending order, acc = fma(float(sum_k q_w * q_x), d_w * d_x, acc), acc from 0;
  // the inner sum is exact int32; d_w is the f16 scale as f32. Float types: acc = fma(w, x[k], acc), k ascending.
  void (*matmul)(const Matrix& w, const void* const* x, uint32_t n, float* const* y, uint32_t tile_begin,
                 uint32_t tile_end);

  // x: `cols` floats, out: q8_row_bytes(cols) bytes; blocks [block_begin, block_end) only. cols % 32 == 0.
  void (*quantize)(const float* x, uint32_t cols, uint32_t block_begin, uint32_t block_end, uint8_t* out);

  // Per group of `group` elements (group divides width): r = 1 / sqrt(lane_sum(x*x as fma) / group + eps);
  // y = (x * r) * w. w has `group` elements if group < width, else width (the same thing). In place is allowed.
  void (*rms_norm)(const float* x, const float* w, float* y, uint32_t width, uint32_t group, float eps);

  void (*add)(const float* a, const float* b, float* y, uint32_t n);         // y = a + b
  void (*accumulate)(float weight, const float* x, float* y, uint32_t n);    // y = fma(weight, x, y)
  void (*swiglu)(const float* gate, const float* up, float* y, uint32_t n);  // y = gate / (1 + exp(-gate)) * up

  // out = [cos(pos*f_0) .. cos(pos*f_{half-1}), sin(pos*f_0) ..] as f32, from double(pos) * double(f) and double
  // arithmetic throughout.
  void (*rope_angles)(uint32_t position, const float* inv_freq, uint32_t half, float* out);
  // Rotates the first `rotary` of each head's head_dim elements in place. angles: as rope_angles wrote, half=rotary/2.
  // x0' = fma(x0, cos, -(x1 * sin)); x1' = fma(x1, cos, x0 * sin).
  void (*rope)(float* x, const float* angles, uint32_t num_heads, uint32_t head_dim, uint32_t rotary, RopeStyle style);

  // kv_type F16 (round to nearest even) or F32. n floats to n stored values: a row of values.
  void (*store_kv)(const float* x, void* out, uint32_t n, DType kv_type);
  // One position's key, x: [head_dim], into the keys of its head: a matrix in tile layout whose rows are positions.
  void (*store_key)(const float* x, uint32_t head_dim, uint32_t position, DType kv_type, void* keys);

  // Attention of n rows of one sequence at positions [position, position + n) with one kv head. q[r], out[r]:
  // [num_q, head_dim]. A row's keys are taken in blocks of 64 anchored at absolute positions; within a block
  // s = scale * (acc = fma(q[d], k[d], acc), d ascending, acc from 0); m' = max(m, block max); c = exp(m - m');
  // p = exp(s - m'), 0 for keys that the row does not see; in 16 lanes l = fma(l, c, (p0 + p1) + (p2 + p3)) over the
  // block's four vectors; acc[d] = acc[d] * c, then fma(p, v[d], acc[d]) for the keys it sees, ascending. In the end
  // out = acc / lane tree of l; out[r] may be q[r]. scratch: attend_scratch_floats(n, num_q, head_dim), the caller's;
  // 64-byte alignment makes it faster.
  void (*attend)(const KeysAndValues& kv, const float* const* q, uint32_t num_q, uint32_t n, uint32_t position,
                 float* const* out, float* scratch);

  // Routing of one row. logits: [num_experts]. The top_k largest logits (ties: lowest id first) are chosen, then
  // written in ascending expert id. softmax: p = exp(l - max) / sum over all experts (ascending order);
  // normalize: p /= sum of the chosen p, in ascending expert id. Weights are then multiplied by `scaling`.
  // A NaN logit counts as -infinity.
  void (*route)(const float* logits, uint32_t num_experts, uint32_t top_k, Scoring scoring, bool normalize,
                float scaling, int32_t* ids, float* weights);

  // The log-probability of a token from logits taken in pieces. First, of each piece of n logits: *max, the largest,
  // and *sum, the lane sum of exp(logit - *max); absent elements are -infinity. Then log_prob puts `pieces` of them
  // together: with m the largest of all, s = fma(double(exp(maxima[i] - m)), double(sums[i]), s), i ascending, s from
  // 0, and the result is (double(logit) - m) - log(s), where log is in double to far better than a float can hold.
  // NaN where any logit is NaN or +infinity.
  void (*sum_exp)(const float* logits, uint32_t n, float* max, float* sum);
  float (*log_prob)(float logit, const float* maxima, const float* sums, uint32_t pieces);
};

// The table that HEADRACE_ISA ("portable", "avx2", "avx512" or "neon") names, else the best this processor has. An
// unknown name or one that the processor lacks throws Error that lists what is available. Read once.
const Kernels& kernels();
// A named table, or nullptr if this processor lacks it. For tests.
const Kernels* kernels_for(const char* isa);
// All that this processor has, best first; portable is the last. For tests.
std::vector<const Kernels*> available_kernels();

// ---- Not dispatched: exact bit movements.

// Rearranges file rows [row_begin, row_begin + num_rows) into tile layout. src: num_rows rows of row_bytes each
// (file layout, any alignment). dst: the whole matrix (matrix_bytes, rows as given). row_begin % 16 == 0; num_rows may
// end inside a tile only at the matrix's last row; padding rows of that tile are zeroed.
void pack_rows(DType type, uint32_t rows, uint32_t cols, uint32_t row_begin, uint32_t num_rows, const uint8_t* src,
               uint8_t* dst);
// The inverse for one row (tests, tied embeddings): tile layout -> file row.
void unpack_row(const Matrix& w, uint32_t row, uint8_t* dst);
// One file row to floats, exactly as gguf-py dequantizes it.
void dequantize_row(DType type, const uint8_t* src, uint32_t cols, float* out);

// CRC-32C (Castagnoli) of n bytes, continuing from `crc` (0 to start), in the fastest way that the processor has.
uint32_t crc32c(uint32_t crc, const void* data, size_t n);
uint32_t crc32c_by_instruction(uint32_t crc, const void* data, size_t n);  // by table where there is no instruction
uint32_t crc32c_by_table(uint32_t crc, const void* data, size_t n);        // its twin, for tests

}  // namespace headrace
