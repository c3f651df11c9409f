#include "executor/program.h"

#include <random>

#include "check.h"
#include "program_builder.h"
#include "support/error.h"

using namespace headrace;

namespace {

// Every op of the table at least once.
std::vector<uint8_t> all_ops() {
  ProgramBuilder b(6, 2);
  const uint32_t table = b.weight(WeightRole::kTable, DType::kF16, 50, 64);
  const uint32_t norm = b.weight(WeightRole::kVector, DType::kF32, 1, 64);
  const uint32_t inv_freq = b.weight(WeightRole::kVector, DType::kF32, 1, 8);
  const uint32_t qkv = b.weight(WeightRole::kMatrix, DType::kQ4_0, 64, 64);
  const uint32_t kv = b.weight(WeightRole::kMatrix, DType::kBF16, 32, 64);
  const uint32_t router = b.weight(WeightRole::kMatrix, DType::kF32, 8, 64);
  const uint32_t head = b.weight(WeightRole::kMatrix, DType::kQ8_0, 50, 64);
  const uint32_t state = b.state(2, 16);
  uint32_t x = b.embed(table);
  const uint32_t angles = b.rope_angles(inv_freq);
  const uint32_t h = b.rms_norm(x, norm, 1e-5);
  const uint32_t q = b.rope(b.linear(h, qkv), angles, 16, 0);
  const uint32_t k = b.rope(b.linear(h, kv), angles, 16, 1);
  const uint32_t a = b.attention(q, k, b.linear(h, kv), state, 4, 0, 0.25);
  x = b.add(x, a);
  const uint32_t ids = b.value(ValueKind::kI32, 2), weights = b.value(ValueKind::kF32, 2);
  b.op(OpCode::kRoute, {b.linear(x, router)}, {}, {}, {ids, weights},
       {int64_t{0}, int64_t{2}, int64_t{0}, int64_t{1}, 1.0});
  x = b.add(x, b.experts(b.as_input(x, DType::kQ4_0), ids, weights, 64, 0, 8, 32, 12));
  return b.bytes(b.output(b.select_rows(x), head));
}

bool parses(const std::vector<uint8_t>& bytes) {
  try {
    parse_program(bytes);
    return true;
  } catch (const Error&) {
    return false;
  }
}

}  // namespace

TEST("a whole program") {
  const Program p = parse_program(all_ops());
  CHECK_EQ(p.max_rows, 6u);
  CHECK_EQ(p.max_out_rows, 2u);
  CHECK_EQ(p.values[p.logits].width, 50u);
  CHECK_EQ(p.weights.size(), 7u);
  CHECK_EQ(p.states[0].head_dim, 16u);
  CHECK(p.ops.front().code == OpCode::kEmbed && p.ops.back().code == OpCode::kOutput);
  for (const OpInfo& op : p.ops)
    if (op.code == OpCode::kAttention) CHECK_EQ(op.attr_double[attr_attention::kScale], 0.25);
}

TEST("logits and log-probabilities are those of the output") {
  const std::vector<uint8_t> good = all_ops();
  const Program p = parse_program(good);
  CHECK(p.values[p.logits].extent == Extent::kLogitRows && p.values[p.log_probs].width == 1);
  const auto with = [&](uint32_t logits, uint32_t log_probs) {
    std::vector<uint8_t> bytes = good;
    std::memcpy(&bytes[32], &logits, sizeof logits);
    std::memcpy(&bytes[36], &log_probs, sizeof log_probs);
    return bytes;
  };
  CHECK(parses(with(p.logits, p.log_probs)));
  CHECK_THROWS(Error, "expected logits and log_probs", parse_program(with(p.logits, kNoValue)));
  CHECK_THROWS(Error, "expected logits and log_probs", parse_program(with(p.log_probs, p.log_probs)));
  CHECK_THROWS(Error, "log_probs value", parse_program(with(p.logits, 10000)));
}

TEST("every cut and every trailing byte is refused") {
  std::vector<uint8_t> bytes = all_ops();
  for (size_t n = 0; n < bytes.size(); ++n) CHECK(!parses({bytes.begin(), bytes.begin() + n}));
  bytes.push_back(0);
  CHECK_THROWS(Error, "after the last op", parse_program(bytes));
}

// Whatever still parses must be safe to plan for: the sanitizers watch, and every value stays inside scratch.
TEST("flipped bytes never get past the checks") {
  const std::vector<uint8_t> good = all_ops();
  std::mt19937 random(7);
  for (int i = 0; i < 6000; ++i) {
    std::vector<uint8_t> bytes = good;
    const int flips = 1 + i % 3;
    for (int f = 0; f < flips; ++f) {
      const size_t at = random() % bytes.size();
      bytes[at] ^= f == 0 ? 1u << (i % 8) : random() % 256;
    }
    try {
      const Program p = parse_program(bytes);
      for (const ValueInfo& v : p.values) CHECK(v.offset < p.scratch_bytes && v.offset + v.width <= p.scratch_bytes);
    } catch (const Error& e) {
      CHECK(std::strncmp(e.what(), "program: ", 9) == 0);
    }
  }
}

TEST("what an op cannot run on is named") {
  auto build = [](auto fn) {
    ProgramBuilder b(4, 1);
    const uint32_t table = b.weight(WeightRole::kTable, DType::kF32, 10, 32);
    const uint32_t logits = fn(b, b.embed(table));
    return b.bytes(logits);
  };
  // A quantized matrix wants quantized input.
  CHECK_THROWS(Error, "(linear): input 0", parse_program(build([](ProgramBuilder& b, uint32_t x) {
                 const uint32_t y = b.value(ValueKind::kF32, 10);
                 b.op(OpCode::kLinear, {x}, {b.weight(WeightRole::kMatrix, DType::kQ8_0, 10, 32)}, {}, {y});
                 return b.select_rows(y);
               })));
  CHECK_THROWS(Error, "(linear): input 0 has kind 0 extent 0 width 32", parse_program(build([](auto& b, uint32_t x) {
                 return b.select_rows(b.linear(x, b.weight(WeightRole::kMatrix, DType::kF32, 10, 48)));
               })));
  CHECK_THROWS(Error, "group 24", parse_program(build([](auto& b, uint32_t x) {
                 return b.select_rows(b.rms_norm(x, b.weight(WeightRole::kVector, DType::kF32, 1, 24), 1e-5));
               })));
  CHECK_THROWS(Error, "role 2, expected 1", parse_program(build([](auto& b, uint32_t x) {
                 return b.select_rows(b.linear(x, b.weight(WeightRole::kVector, DType::kF32, 1, 32)));
               })));
  CHECK_THROWS(Error, "3 query heads over 2", parse_program(build([](auto& b, uint32_t x) {
                 return b.select_rows(b.attention(x, x, x, b.state(2, 16), 3, 0, 1.0));
               })));
  CHECK_THROWS(Error, "attribute 1 is 11", parse_program(build([](auto& b, uint32_t x) {
                 const uint32_t ids = b.value(ValueKind::kI32, 11), weights = b.value(ValueKind::kF32, 11);
                 const uint32_t logits = b.linear(x, b.weight(WeightRole::kMatrix, DType::kF32, 10, 32));
                 b.op(OpCode::kRoute, {logits}, {}, {}, {ids, weights},
                      {int64_t{0}, int64_t{11}, int64_t{0}, int64_t{1}, 1.0});
                 return b.select_rows(weights);
               })));
  CHECK_THROWS(Error, "before it is written", parse_program(build([](ProgramBuilder& b, uint32_t x) {
                 return b.select_rows(b.add(x, b.value(ValueKind::kF32, 32)));
               })));
  CHECK_THROWS(Error, "a second time", parse_program(build([](ProgramBuilder& b, uint32_t x) {
                 b.op(OpCode::kAdd, {x, x}, {}, {}, {x});
                 return b.select_rows(x);
               })));
  CHECK_THROWS(Error, "logits", parse_program(build([](ProgramBuilder&, uint32_t x) { return x; })));
}

TEST("a value written over one that is still needed is refused") {
  const std::vector<uint8_t> good = all_ops();
  const Program p = parse_program(good);
  const auto moved = [&](uint32_t value, uint64_t offset) {
    std::vector<uint8_t> bytes = good;
    std::memcpy(&bytes[48 + 24 * value + 16], &offset, sizeof offset);
    return bytes;
  };
  for (const OpInfo& op : p.ops) {
    if (op.inputs.empty()) continue;
    const uint32_t x = op.inputs[0], y = op.outputs[0];
    const bool in_place = op.code == OpCode::kRope || op.code == OpCode::kAttention || op.code == OpCode::kAdd;
    CHECK_EQ(parses(moved(y, p.values[x].offset)), in_place);
    if (p.values[x].offset >= 64) CHECK(!parses(moved(y, p.values[x].offset - 64)));
  }
}
