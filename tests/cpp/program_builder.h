// Builds the flat bytes of a program (headrace/program.py) by hand. Every value has memory of its own.
#pragma once

#include <cstdint>
#include <cstring>
#include <variant>
#include <vector>

#include "executor/program.h"

namespace headrace {

class ProgramBuilder {
 public:
  using Attrs = std::vector<std::variant<int64_t, double>>;

  ProgramBuilder(uint32_t max_rows, uint32_t max_out_rows) : max_rows_(max_rows), max_out_rows_(max_out_rows) {}

  uint32_t value(ValueKind kind, uint64_t width, Extent extent = Extent::kRows) {
    const uint64_t rows = extent == Extent::kNone ? 1 : extent == Extent::kLogitRows ? max_out_rows_ : max_rows_;
    const uint64_t row = kind == ValueKind::kQ8 ? q8_row_bytes(width) : kind == ValueKind::kBytes ? width : width * 4;
    values_.push_back({kind, extent, width, scratch_});
    scratch_ += (rows * row + 63) / 64 * 64;
    return static_cast<uint32_t>(values_.size() - 1);
  }
  // A value begins so many bytes before its place, where the one before it ends.
  void move_back(uint32_t value, uint64_t bytes) { values_[value].offset -= bytes; }
  uint32_t weight(WeightRole role, DType dtype, uint32_t rows, uint32_t cols) {
    weights_.push_back({role, dtype, rows, cols});
    return static_cast<uint32_t>(weights_.size() - 1);
  }
  uint32_t state(uint32_t num_heads, uint32_t head_dim) {
    states_.push_back({StateKind::kKv, num_heads, head_dim});
    return static_cast<uint32_t>(states_.size() - 1);
  }
  void op(OpCode code, std::vector<uint32_t> inputs, std::vector<uint32_t> weights, std::vector<uint32_t> states,
          std::vector<uint32_t> outputs, Attrs attrs = {}) {
    ops_.push_back(
        {code, std::move(inputs), std::move(weights), std::move(states), std::move(outputs), std::move(attrs)});
  }

  // ---- ops with one F32 output

  uint32_t embed(uint32_t table) { return emit(OpCode::kEmbed, {}, {table}, {}, weights_[table].cols, Extent::kRows); }
  uint32_t rms_norm(uint32_t x, uint32_t weight, double eps) {
    return emit(OpCode::kRmsNorm, {x}, {weight}, {}, values_[x].width, values_[x].extent,
                {int64_t{weights_[weight].cols}, eps});
  }
  uint32_t as_input(uint32_t x, DType type) {
    if (!is_quantized(type) || values_[x].kind == ValueKind::kQ8) return x;
    const uint32_t y = value(ValueKind::kQ8, values_[x].width, values_[x].extent);
    op(OpCode::kQuantize, {x}, {}, {}, {y});
    return y;
  }
  uint32_t linear(uint32_t x, uint32_t weight) {
    const uint32_t in = as_input(x, weights_[weight].dtype);
    return emit(OpCode::kLinear, {in}, {weight}, {}, weights_[weight].rows, values_[x].extent);
  }
  uint32_t rope_angles(uint32_t inv_freq) {
    return emit(OpCode::kRopeAngles, {}, {inv_freq}, {}, 2 * uint64_t{weights_[inv_freq].cols}, Extent::kRows);
  }
  uint32_t rope(uint32_t x, uint32_t angles, int64_t head_dim, int64_t style) {
    return emit(OpCode::kRope, {x, angles}, {}, {}, values_[x].width, Extent::kRows, {head_dim, style});
  }
  uint32_t attention(uint32_t q, uint32_t k, uint32_t v, uint32_t state, int64_t num_q, int64_t window, double scale) {
    const StateInfo s = states_[state];
    return emit(OpCode::kAttention, {q, k, v}, {}, {state}, values_[q].width, Extent::kRows,
                {num_q, int64_t{s.num_heads}, int64_t{s.head_dim}, window, scale});
  }
  uint32_t add(uint32_t a, uint32_t b) {
    return emit(OpCode::kAdd, {a, b}, {}, {}, values_[a].width, values_[a].extent);
  }
  uint32_t select_rows(uint32_t x) {
    const uint32_t y = value(values_[x].kind, values_[x].width, Extent::kOutRows);
    op(OpCode::kSelectRows, {x}, {}, {}, {y});
    return y;
  }
  uint32_t experts(uint32_t x, uint32_t ids, uint32_t weights, uint32_t hidden, int64_t layer, int64_t num_experts,
                   int64_t width, int64_t capacity) {
    const uint32_t y = value(ValueKind::kF32, hidden, values_[x].extent);
    const uint32_t workspace =
        value(ValueKind::kBytes, capacity * (8 * width + q8_row_bytes(width) + 4 * hidden), Extent::kNone);
    op(OpCode::kExperts, {x, ids, weights}, {}, {}, {y, workspace}, {layer, num_experts, width, capacity});
    return y;
  }

  struct End {
    uint32_t logits, log_probs;
  };
  End output(uint32_t x, uint32_t weight) {
    const uint32_t in = as_input(x, weights_[weight].dtype);
    const uint32_t logits = value(ValueKind::kF32, weights_[weight].rows, Extent::kLogitRows);
    const uint32_t log_probs = value(ValueKind::kF32, 1, Extent::kOutRows);
    op(OpCode::kOutput, {in}, {weight}, {}, {logits, log_probs});
    return {logits, log_probs};
  }

  std::vector<uint8_t> bytes(uint32_t logits) const { return bytes(End{logits, kNoValue}); }
  std::vector<uint8_t> bytes(End end) const {
    std::vector<uint8_t> out = {'H', 'R', 'P', 'R', 'O', 'G', '1', 0};
    auto u32 = [&](uint64_t v) { append(out, static_cast<uint32_t>(v)); };
    for (uint64_t n : {values_.size(), weights_.size(), states_.size(), ops_.size()}) u32(n);
    for (uint32_t n : {max_rows_, max_out_rows_, end.logits, end.log_probs}) u32(n);
    append(out, scratch_);
    for (const ValueInfo& v : values_) {
      u32(static_cast<uint32_t>(v.kind)), u32(static_cast<uint32_t>(v.extent));
      append(out, v.width), append(out, v.offset);
    }
    for (const WeightInfo& w : weights_) {
      u32(static_cast<uint32_t>(w.role)), u32(static_cast<uint32_t>(w.dtype)), u32(w.rows), u32(w.cols);
    }
    for (const StateInfo& s : states_) u32(static_cast<uint32_t>(s.kind)), u32(s.num_heads), u32(s.head_dim), u32(0);
    for (const OpBytes& o : ops_) {
      u32(static_cast<uint32_t>(o.code));
      const std::vector<uint32_t>* lists[4] = {&o.inputs, &o.weights, &o.states, &o.outputs};
      for (auto* list : lists) u32(list->size());
      u32(o.attrs.size());
      for (auto* list : lists)
        for (uint32_t i : *list) u32(i);
      out.resize((out.size() + 7) / 8 * 8);
      for (const auto& a : o.attrs) std::visit([&](auto v) { append(out, v); }, a);
    }
    return out;
  }

 private:
  struct OpBytes {
    OpCode code;
    std::vector<uint32_t> inputs, weights, states, outputs;
    Attrs attrs;
  };

  template <class T>
  static void append(std::vector<uint8_t>& out, T v) {
    const size_t at = out.size();
    out.resize(at + sizeof v);
    std::memcpy(out.data() + at, &v, sizeof v);
  }
  uint32_t emit(OpCode code, std::vector<uint32_t> inputs, std::vector<uint32_t> weights, std::vector<uint32_t> states,
                uint64_t width, Extent extent, Attrs attrs = {}) {
    const uint32_t y = value(ValueKind::kF32, width, extent);
    op(code, std::move(inputs), std::move(weights), std::move(states), {y}, std::move(attrs));
    return y;
  }

  uint32_t max_rows_, max_out_rows_;
  uint64_t scratch_ = 0;
  std::vector<ValueInfo> values_;
  std::vector<WeightInfo> weights_;
  std::vector<StateInfo> states_;
  std::vector<OpBytes> ops_;
};

}  // namespace headrace
