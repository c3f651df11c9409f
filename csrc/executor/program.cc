#include "executor/program.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

#include "support/error.h"

namespace headrace {

namespace {

// Far above any model, and small enough that no product of them below leaves 64 bits.
constexpr uint64_t kMaxRows = 1u << 20;
constexpr uint64_t kMaxWidth = 1u << 24;
constexpr uint64_t kMaxWeightRows = 1u << 28;
constexpr uint64_t kMaxBytes = uint64_t{1} << 44;
constexpr uint64_t kMaxStates = 1u << 10;
constexpr uint64_t kMaxHeadWidth = 1u << 20;  // num_heads * head_dim

[[noreturn]] void bad(const std::string& what) { throw Error("program: " + what + "; compile the graph again"); }

void require(bool ok, const std::string& what) {
  if (!ok) bad(what);
}

std::string str(uint64_t n) { return std::to_string(n); }

// Reads little-endian numbers in order; every read is checked against the end.
class Reader {
 public:
  explicit Reader(std::span<const uint8_t> bytes) : bytes_(bytes) {}

  template <class T>
  T next() {
    T v;
    std::memcpy(&v, take(sizeof v), sizeof v);
    return v;
  }
  uint32_t u32() { return next<uint32_t>(); }
  uint64_t u64() { return next<uint64_t>(); }
  const uint8_t* take(uint64_t n) {
    require(n <= left(), "byte " + str(at_) + ": expected " + str(n) + " more bytes, found " + str(left()));
    at_ += n;
    return bytes_.data() + at_ - n;
  }
  void align8() {
    for (; at_ % 8 != 0;) require(*take(1) == 0, "byte " + str(at_) + ": expected zero padding");
  }
  uint64_t left() const { return bytes_.size() - at_; }

  // A count whose items take at least `item_bytes` each, so that no hostile count is ever allocated for.
  uint32_t count(const char* of, uint64_t item_bytes) {
    uint32_t n = u32();
    require(n <= left() / item_bytes,
            "count of " + std::string(of) + " is " + str(n) + ", but only " + str(left()) + " bytes follow");
    return n;
  }

 private:
  std::span<const uint8_t> bytes_;
  uint64_t at_ = 0;
};

uint64_t value_row_bytes(const ValueInfo& v) {
  switch (v.kind) {
    case ValueKind::kQ8: return q8_row_bytes(v.width);
    case ValueKind::kBytes: return v.width;
    default: return v.width * 4;
  }
}

uint64_t value_bytes(const Program& p, const ValueInfo& v) {
  if (v.extent == Extent::kNone) return v.width;
  return value_row_bytes(v) * (v.extent == Extent::kLogitRows ? p.max_out_rows : p.max_rows);
}

ValueInfo read_value(Reader& in, const Program& p, uint32_t index) {
  std::string at = "value " + str(index) + ": ";
  uint32_t kind = in.u32(), extent = in.u32();
  require(kind <= static_cast<uint32_t>(ValueKind::kBytes), at + "unknown kind " + str(kind));
  require(extent <= static_cast<uint32_t>(Extent::kLogitRows), at + "unknown extent " + str(extent));
  uint64_t width = in.u64(), offset = in.u64();
  ValueInfo v{static_cast<ValueKind>(kind), static_cast<Extent>(extent), width, offset};
  bool is_workspace = v.kind == ValueKind::kBytes;
  require(is_workspace == (v.extent == Extent::kNone), at + "a workspace, and only a workspace, has no row extent");
  require(width >= 1 && width <= (is_workspace ? kMaxBytes : kMaxWidth), at + "width " + str(width));
  require(v.kind != ValueKind::kQ8 || width % kQuantBlock == 0, at + "width " + str(width) + " is not whole blocks");
  require(offset % 64 == 0, at + "offset " + str(offset) + " is not a multiple of 64");
  require(offset <= p.scratch_bytes && value_bytes(p, v) <= p.scratch_bytes - offset,
          at + str(value_bytes(p, v)) + " bytes at offset " + str(offset) + " leave the scratch of " +
              str(p.scratch_bytes));
  return v;
}

WeightInfo read_weight(Reader& in, uint32_t index) {
  std::string at = "weight " + str(index) + ": ";
  uint32_t role = in.u32(), dtype = in.u32(), rows = in.u32(), cols = in.u32();
  require(role <= static_cast<uint32_t>(WeightRole::kVector), at + "unknown role " + str(role));
  require(is_known_dtype(dtype), at + "unknown type " + str(dtype));
  require(rows >= 1 && rows <= kMaxWeightRows && cols >= 1 && cols <= kMaxWidth,
          at + "shape [" + str(rows) + ", " + str(cols) + "]");
  WeightInfo w{static_cast<WeightRole>(role), static_cast<DType>(dtype), rows, cols};
  require(!is_quantized(w.dtype) || cols % kQuantBlock == 0, at + str(cols) + " columns are not whole blocks");
  require(w.role != WeightRole::kVector || (rows == 1 && w.dtype == DType::kF32), at + "a vector is one row of F32");
  return w;
}

StateInfo read_state(Reader& in, uint32_t index) {
  std::string at = "state " + str(index) + ": ";
  uint32_t kind = in.u32(), num_heads = in.u32(), head_dim = in.u32(), reserved = in.u32();
  require(kind == static_cast<uint32_t>(StateKind::kKv) && reserved == 0, at + "unknown kind " + str(kind));
  require(num_heads >= 1 && head_dim >= 1 && uint64_t{num_heads} * head_dim <= kMaxHeadWidth,
          at + str(num_heads) + " heads of " + str(head_dim));
  return StateInfo{StateKind::kKv, num_heads, head_dim};
}

std::vector<uint32_t> read_indices(Reader& in, uint32_t n, uint64_t limit, const std::string& what) {
  std::vector<uint32_t> out(n);
  for (uint32_t& i : out) {
    i = in.u32();
    require(i < limit, what + " " + str(i) + " of " + str(limit));
  }
  return out;
}

OpInfo read_op(Reader& in, const Program& p, uint32_t index) {
  std::string at = "op " + str(index) + ": ";
  uint32_t code = in.u32();
  require(code < kNumOps, at + "unknown code " + str(code));
  const OpSpec& spec = kOps[code];
  at = "op " + str(index) + " (" + spec.name + "): ";
  const uint32_t expected[5] = {spec.num_inputs, spec.num_weights, spec.num_states, spec.num_outputs, spec.num_attrs};
  const char* names[5] = {" inputs", " weights", " states", " outputs", " attributes"};
  for (int i = 0; i < 5; ++i) {
    uint32_t n = in.u32();
    require(n == expected[i], at + str(n) + names[i] + ", expected " + str(expected[i]));
  }
  OpInfo op;
  op.code = static_cast<OpCode>(code);
  op.inputs = read_indices(in, spec.num_inputs, p.values.size(), at + "input value");
  op.weights = read_indices(in, spec.num_weights, p.weights.size(), at + "weight");
  op.states = read_indices(in, spec.num_states, p.states.size(), at + "state");
  op.outputs = read_indices(in, spec.num_outputs, p.values.size(), at + "output value");
  in.align8();
  for (uint32_t a = 0; a < spec.num_attrs; ++a) {
    bool is_double = spec.attr_types[a] == 'd';
    op.attr_int.push_back(is_double ? 0 : in.next<int64_t>());
    op.attr_double.push_back(is_double ? in.next<double>() : 0);
  }
  return op;
}

// The shape rules of headrace/ops.py, op by op, on one op of a program.
class ShapeCheck {
 public:
  ShapeCheck(const Program& p, uint32_t index) : p_(p), index_(index), op_(p.ops[index]) {}

  void run() const {
    switch (op_.code) {
      case OpCode::kEmbed: return embed();
      case OpCode::kRmsNorm: return rms_norm();
      case OpCode::kQuantize: return quantize();
      case OpCode::kLinear: return linear();
      case OpCode::kRopeAngles: return rope_angles();
      case OpCode::kRope: return rope();
      case OpCode::kAttention: return attention();
      case OpCode::kAdd: return add();
      case OpCode::kRoute: return route();
      case OpCode::kExperts: return experts();
      case OpCode::kSelectRows: return select_rows();
      case OpCode::kOutput: return end();
    }
  }

 private:
  void embed() const {
    expect_weight(WeightRole::kTable);
    expect(output(0), ValueKind::kF32, Extent::kRows, weight().cols, "output 0");
  }
  void rms_norm() const {
    const ValueInfo& x = input(0);
    int64_t group = attr(attr_rms_norm::kGroup, 1, kMaxWidth);
    expect_weight(WeightRole::kVector);
    require(
        weight().cols == group && x.width % group == 0,
        at() + "group " + str(group) + " against a row of " + str(x.width) + " and a weight of " + str(weight().cols));
    expect_finite(attr_rms_norm::kEps);
    expect(x, ValueKind::kF32, x.extent, x.width, "input 0");
    expect(output(0), x.kind, x.extent, x.width, "output 0");
  }
  void quantize() const {
    const ValueInfo& x = input(0);
    expect(x, ValueKind::kF32, x.extent, x.width, "input 0");
    expect(output(0), ValueKind::kQ8, x.extent, x.width, "output 0");
  }
  void linear() const {
    const ValueInfo& x = input(0);
    expect_weight(WeightRole::kMatrix);
    expect(x, is_quantized(weight().dtype) ? ValueKind::kQ8 : ValueKind::kF32, x.extent, weight().cols, "input 0");
    expect(output(0), ValueKind::kF32, x.extent, weight().rows, "output 0");
  }
  void rope_angles() const {
    expect_weight(WeightRole::kVector);
    expect(output(0), ValueKind::kF32, Extent::kRows, 2 * uint64_t{weight().cols}, "output 0");
  }
  void rope() const {
    const ValueInfo &x = input(0), &angles = input(1);
    int64_t head_dim = attr(attr_rope::kHeadDim, 1, kMaxWidth);
    attr(attr_rope::kStyle, 0, 1);
    expect(x, ValueKind::kF32, Extent::kRows, x.width, "input 0");
    expect(angles, ValueKind::kF32, Extent::kRows, angles.width, "input 1");
    require(
        x.width % head_dim == 0 && angles.width % 2 == 0 && angles.width <= static_cast<uint64_t>(head_dim),
        at() + "heads of " + str(head_dim) + " in a row of " + str(x.width) + " with " + str(angles.width) + " angles");
    expect(output(0), x.kind, x.extent, x.width, "output 0");
  }
  void attention() const {
    int64_t num_q = attr(attr_attention::kNumAttentionHeads, 1, kMaxHeadWidth);
    int64_t num_kv = attr(attr_attention::kNumKeyValueHeads, 1, kMaxHeadWidth);
    int64_t head_dim = attr(attr_attention::kHeadDim, 1, kMaxHeadWidth);
    attr(attr_attention::kWindow, 0, UINT32_MAX);
    expect_finite(attr_attention::kScale);
    require(num_q % num_kv == 0, at() + str(num_q) + " query heads over " + str(num_kv) + " key heads");
    const StateInfo& state = p_.states[op_.states[0]];
    require(state.num_heads == num_kv && state.head_dim == head_dim, at() + "state of " + str(state.num_heads) + " x " +
                                                                         str(state.head_dim) + ", expected " +
                                                                         str(num_kv) + " x " + str(head_dim));
    expect(input(0), ValueKind::kF32, Extent::kRows, num_q * head_dim, "input 0");
    expect(input(1), ValueKind::kF32, Extent::kRows, num_kv * head_dim, "input 1");
    expect(input(2), ValueKind::kF32, Extent::kRows, num_kv * head_dim, "input 2");
    expect(output(0), ValueKind::kF32, Extent::kRows, num_q * head_dim, "output 0");
  }
  void add() const {
    const ValueInfo& a = input(0);
    expect(a, ValueKind::kF32, a.extent, a.width, "input 0");
    expect(input(1), a.kind, a.extent, a.width, "input 1");
    expect(output(0), a.kind, a.extent, a.width, "output 0");
  }
  void route() const {
    const ValueInfo& logits = input(0);
    expect(logits, ValueKind::kF32, logits.extent, logits.width, "input 0");
    attr(attr_route::kLayer, 0, kMaxWidth);
    int64_t top_k = attr(attr_route::kTopK, 1, logits.width);
    attr(attr_route::kScoring, 0, 0);
    attr(attr_route::kNormalize, 0, 1);
    expect_finite(attr_route::kScaling);
    expect(output(0), ValueKind::kI32, logits.extent, top_k, "output 0");
    expect(output(1), ValueKind::kF32, logits.extent, top_k, "output 1");
  }
  void experts() const {
    const ValueInfo &x = input(0), &ids = input(1);
    attr(attr_experts::kLayer, 0, kMaxWidth);
    int64_t num_experts = attr(attr_experts::kNumExperts, 1, kMaxWidth);
    int64_t width = attr(attr_experts::kMoeIntermediateSize, 1, kMaxWidth);
    int64_t capacity = attr(attr_experts::kRouteCapacity, 1, kMaxRows);
    require(x.kind == ValueKind::kF32 || x.kind == ValueKind::kQ8, at() + "input 0 is neither F32 nor Q8");
    require(ids.width <= static_cast<uint64_t>(num_experts),
            at() + str(ids.width) + " routes a row over " + str(num_experts) + " experts");
    expect(ids, ValueKind::kI32, x.extent, ids.width, "input 1");
    expect(input(2), ValueKind::kF32, x.extent, ids.width, "input 2");
    expect(output(0), ValueKind::kF32, x.extent, x.width, "output 0");
    uint64_t workspace = capacity * (2 * 4 * width + q8_row_bytes(width) + 4 * x.width);
    expect(output(1), ValueKind::kBytes, Extent::kNone, workspace, "output 1");
  }
  void select_rows() const {
    const ValueInfo& x = input(0);
    expect(x, x.kind, Extent::kRows, x.width, "input 0");
    expect(output(0), x.kind, Extent::kOutRows, x.width, "output 0");
  }

  void end() const {
    expect_weight(WeightRole::kMatrix);
    expect(input(0), is_quantized(weight().dtype) ? ValueKind::kQ8 : ValueKind::kF32, Extent::kOutRows, weight().cols,
           "input 0");
    expect(output(0), ValueKind::kF32, Extent::kLogitRows, weight().rows, "output 0");
    expect(output(1), ValueKind::kF32, Extent::kOutRows, 1, "output 1");
    require(
        op_.outputs[0] == p_.logits && op_.outputs[1] == p_.log_probs,
        at() + "outputs " + str(op_.outputs[0]) + " and " + str(op_.outputs[1]) + ", expected logits and log_probs");
  }

  const ValueInfo& input(int i) const { return p_.values[op_.inputs[i]]; }
  const ValueInfo& output(int i) const { return p_.values[op_.outputs[i]]; }
  const WeightInfo& weight() const { return p_.weights[op_.weights[0]]; }
  std::string at() const { return "op " + str(index_) + " (" + kOps[static_cast<uint32_t>(op_.code)].name + "): "; }
  int64_t attr(uint32_t i, int64_t least, int64_t most) const {
    int64_t v = op_.attr_int[i];
    require(v >= least && v <= most, at() + "attribute " + str(i) + " is " + std::to_string(v) + ", expected " +
                                         std::to_string(least) + " to " + std::to_string(most));
    return v;
  }
  void expect_finite(uint32_t attr) const {
    require(std::isfinite(op_.attr_double[attr]), at() + "attribute " + str(attr) + " is not finite");
  }
  void expect_weight(WeightRole role) const {
    require(weight().role == role, at() + "weight " + str(op_.weights[0]) + " has role " +
                                       str(static_cast<uint32_t>(weight().role)) + ", expected " +
                                       str(static_cast<uint32_t>(role)));
  }
  void expect(const ValueInfo& v, ValueKind kind, Extent extent, uint64_t width, const char* what) const {
    auto shape = [](ValueKind k, Extent e, uint64_t w) {
      return "kind " + str(static_cast<uint32_t>(k)) + " extent " + str(static_cast<uint32_t>(e)) + " width " + str(w);
    };
    require(v.kind == kind && v.extent == extent && v.width == width,
            at() + what + " has " + shape(v.kind, v.extent, v.width) + ", expected " + shape(kind, extent, width));
  }

  const Program& p_;
  uint32_t index_;
  const OpInfo& op_;
};

// The first output of these may lie exactly on the first input, if that is not needed again.
bool may_run_in_place(OpCode code) {
  return code == OpCode::kRmsNorm || code == OpCode::kRope || code == OpCode::kAttention || code == OpCode::kAdd;
}

// Every value is written once, before it is read, and while it lives nothing else is written over it.
void check_buffers(const Program& p) {
  std::vector<size_t> last_use(p.values.size(), 0);
  for (size_t i = 0; i < p.ops.size(); ++i)
    for (uint32_t v : p.ops[i].inputs) last_use[v] = i;
  last_use[p.logits] = p.ops.size();
  if (p.log_probs != kNoValue) last_use[p.log_probs] = p.ops.size();

  std::vector<bool> written(p.values.size(), false);
  std::vector<uint32_t> live;
  for (size_t i = 0; i < p.ops.size(); ++i) {
    const OpInfo& op = p.ops[i];
    std::string at = "op " + str(i) + " (" + kOps[static_cast<uint32_t>(op.code)].name + "): ";
    for (uint32_t v : op.inputs) require(written[v], at + "reads value " + str(v) + " before it is written");
    for (size_t k = 0; k < op.outputs.size(); ++k) {
      uint32_t out = op.outputs[k];
      require(!written[out], at + "writes value " + str(out) + " a second time");
      written[out] = true;
      for (uint32_t v : live) {
        bool in_place = k == 0 && may_run_in_place(op.code) && v == op.inputs[0] && last_use[v] == i &&
                        std::count(op.inputs.begin(), op.inputs.end(), v) == 1 &&
                        p.values[v].offset == p.values[out].offset;
        require(in_place || !overlap(p, v, out),
                at + "value " + str(out) + " overlaps value " + str(v) + ", which is still needed");
      }
      live.push_back(out);
    }
    std::erase_if(live, [&](uint32_t v) { return last_use[v] <= i; });
  }
  require(written[p.logits], "logits value " + str(p.logits) + " is never written");
  require(p.log_probs == kNoValue || written[p.log_probs], "log_probs value is never written");
}

}  // namespace

bool overlap(const Program& program, uint32_t a, uint32_t b) {
  const ValueInfo &x = program.values[a], &y = program.values[b];
  return x.offset < y.offset + value_bytes(program, y) && y.offset < x.offset + value_bytes(program, x);
}

RoutingShape routing_shape(const Program& program) {
  RoutingShape shape;
  for (const OpInfo& op : program.ops) {
    if (op.code != OpCode::kRoute) continue;
    const ValueInfo& logits = program.values[op.inputs[0]];
    const uint64_t layer = static_cast<uint64_t>(op.attr_int[attr_route::kLayer]);
    const uint32_t num_experts = static_cast<uint32_t>(logits.width);
    const uint32_t top_k = static_cast<uint32_t>(op.attr_int[attr_route::kTopK]);
    require(layer == shape.num_layers,
            "the route of layer " + str(layer) + " stands where layer " + str(shape.num_layers) + " is due");
    require(layer == 0 || (num_experts == shape.num_experts && top_k == shape.top_k),
            "layer " + str(layer) + " routes to " + str(top_k) + " of " + str(num_experts) +
                " experts, the layers before it to " + str(shape.top_k) + " of " + str(shape.num_experts));
    shape = {shape.num_layers + 1, num_experts, top_k, shape.all_rows && logits.extent == Extent::kRows};
  }
  return shape;
}

Program parse_program(std::span<const uint8_t> bytes) {
  constexpr char kMagic[8] = {'H', 'R', 'P', 'R', 'O', 'G', '1', '\0'};
  Reader in(bytes);
  require(std::memcmp(in.take(sizeof kMagic), kMagic, sizeof kMagic) == 0, "does not start with HRPROG1");
  Program p;
  uint32_t num_values = in.count("values", 24), num_weights = in.count("weights", 16);
  uint32_t num_states = in.count("states", 16), num_ops = in.count("ops", 24);
  p.max_rows = in.u32();
  p.max_out_rows = in.u32();
  p.logits = in.u32();
  p.log_probs = in.u32();
  p.scratch_bytes = in.u64();
  require(p.max_rows >= 1 && p.max_rows <= kMaxRows, "max_rows is " + str(p.max_rows));
  require(p.max_out_rows >= 1 && p.max_out_rows <= p.max_rows,
          "max_out_rows is " + str(p.max_out_rows) + " of " + str(p.max_rows) + " rows");
  require(p.scratch_bytes <= kMaxBytes, "scratch is " + str(p.scratch_bytes) + " bytes");
  require(num_states <= kMaxStates, str(num_states) + " states");
  require(p.logits < num_values, "logits value " + str(p.logits) + " of " + str(num_values));
  require(p.log_probs < num_values || p.log_probs == kNoValue,
          "log_probs value " + str(p.log_probs) + " of " + str(num_values));

  for (uint32_t i = 0; i < num_values; ++i) p.values.push_back(read_value(in, p, i));
  for (uint32_t i = 0; i < num_weights; ++i) p.weights.push_back(read_weight(in, i));
  for (uint32_t i = 0; i < num_states; ++i) p.states.push_back(read_state(in, i));
  for (uint32_t i = 0; i < num_ops; ++i) {
    p.ops.push_back(read_op(in, p, i));
    ShapeCheck(p, i).run();
  }
  require(in.left() == 0, str(in.left()) + " bytes after the last op");
  const ValueInfo& logits = p.values[p.logits];
  require(logits.kind == ValueKind::kF32 && (logits.extent == Extent::kOutRows || logits.extent == Extent::kLogitRows),
          "logits are not F32 rows of output");
  require(p.log_probs == kNoValue ||
              std::any_of(p.ops.begin(), p.ops.end(), [](const OpInfo& op) { return op.code == OpCode::kOutput; }),
          "log_probs are not those of an output");
  check_buffers(p);
  return p;
}

}  // namespace headrace
