// The compiled graph: flat bytes written by headrace/program.py, parsed and checked once. Byte layout: see there.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "executor/op_table.h"
#include "kernels/dtype.h"

namespace headrace {

struct ValueInfo {
  ValueKind kind;
  Extent extent;
  uint64_t width;
  uint64_t offset;  // in scratch, a multiple of 64, for max_rows rows, or max_out_rows of Extent::kLogitRows
};

enum class WeightRole : uint32_t { kTable = 0, kMatrix = 1, kVector = 2 };

struct WeightInfo {
  WeightRole role;
  DType dtype;
  uint32_t rows, cols;
};

struct StateInfo {
  StateKind kind;
  uint32_t num_heads, head_dim;
};

struct OpInfo {
  OpCode code;
  std::vector<uint32_t> inputs, weights, states, outputs;
  std::vector<int64_t> attr_int;  // by attribute index; 0 where the attribute is a double
  std::vector<double> attr_double;
};

constexpr uint32_t kNoValue = UINT32_MAX;

// max_out_rows: rows whose logits one pass can return. Of the other rows' outputs it has room for all.
struct Program {
  std::vector<ValueInfo> values;
  std::vector<WeightInfo> weights;
  std::vector<StateInfo> states;
  std::vector<OpInfo> ops;
  uint32_t max_rows, max_out_rows;
  uint32_t logits, log_probs;  // values; kNoValue: a program without `output`, which gives logits only
  uint64_t scratch_bytes;
};

// What a program's routes choose from; no layers if it has none.
struct RoutingShape {
  uint32_t num_layers = 0, num_experts = 0, top_k = 0;
  bool all_rows = true;  // every row of a pass is routed in every layer, not only rows whose logits are wanted
};

// Throws Error unless the routes' layers are 0, 1, ... and all have one shape.
RoutingShape routing_shape(const Program& program);
// Whether values a and b share memory, in the largest pass.
bool overlap(const Program& program, uint32_t a, uint32_t b);

// Throws Error on anything that a kernel could trip over: counts, indices, kinds, widths against weights and
// attributes, offsets outside scratch, trailing bytes.
Program parse_program(std::span<const uint8_t> bytes);

}  // namespace headrace
