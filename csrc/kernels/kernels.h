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

  // kv_type F16 (round to nearest even) or F32. n floats to n stored values, and back.
  void (*store_kv)(const float* x, void* out, uint32_t n, DType kv_type);

  // Attention of `num_q` query heads that share one kv head, for one row. q: [num_q, head_dim]; k, v: stored values,
  // position p at k + p * stride_elems; out: [num_q, head_dim]. Keys [first, last] (inclusive) are visible.
  // Keys are taken in blocks of 32 anchored at absolute positions; online softmax from block to block:
  // s = scale * lane_sum(q*k as fma); m' = max(m, block max); c = exp(m - m'); l = fma(l, c, sum of p in ascending
  // order); acc[d] = acc[d] * c, then fma(p, v[d], acc[d]) in ascending key order; out = acc / l. scratch: num_q *
  // (head_dim + 34) floats, caller-owned.
  void (*attend)(const float* q, uint32_t num_q, uint32_t head_dim, const void* k, const void* v, DType kv_type,
                 size_t stride_elems, uint32_t first, uint32_t last, float scale, float* out, float* scratch);

  // Routing of one row. logits: [num_experts]. The top_k largest logits (ties: lowest id first) are chosen, then
  // written in ascending expert id. softmax: p = exp(l - max) / sum over all experts (ascending order);
  // normalize: p /= sum of the chosen p, in ascending expert id. Weights are then multiplied by `scaling`.
  // A NaN logit counts as -infinity.
  void (*route)(const float* logits, uint32_t num_experts, uint32_t top_k, Scoring scoring, bool normalize,
                float scaling, int32_t* ids, float* weights);
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

// CRC-32C (Castagnoli) of n bytes, continuing from `crc` (0 to start), by the processor's instruction if it has one.
uint32_t crc32c(uint32_t crc, const void* data, size_t n);
uint32_t crc32c_by_table(uint32_t crc, const void* data, size_t n);  // its twin, for tests

}  // namespace headrace
