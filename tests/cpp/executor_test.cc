#include "executor/executor.h"

#include <algorithm>
#include <numeric>
#include <random>

#include "check.h"
#include "executor/ops.h"
#include "experts/expert_source.h"
#include "support/error.h"
#include "tiny_model.h"

using namespace headrace;

namespace {

constexpr auto kQ4 = DType::kQ4_0, kQ8 = DType::kQ8_0, kF32 = DType::kF32, kF16 = DType::kF16, kBF16 = DType::kBF16;

// A model with everything that running it takes.
struct Runner {
  TinyModel& model;
  Program program;
  std::unique_ptr<Weights> weights;
  ExpertMemory memory;
  Executor executor;

  Runner(TinyModel& m, uint32_t max_rows, uint32_t route_capacity, uint64_t arena_bytes, uint32_t num_threads)
      : model(m),
        program(m.program(max_rows, max_rows, route_capacity)),
        weights(m.load(program)),
        memory(m.source(), {.arena_bytes = arena_bytes}),
        executor(program, *weights, &memory, num_threads) {}

  // Logits of all rows of one pass.
  std::vector<float> pass(SessionState& state, const int32_t* tokens, uint32_t n,
                          std::function<bool()> should_stop = nullptr, bool per_slot = false) {
    std::vector<uint32_t> sequences(n, 0), out_rows(n);
    for (uint32_t i = 0; i < n; ++i) out_rows[i] = i;
    std::vector<float> logits(n * model.spec.vocab);
    SessionState* states[] = {&state};
    executor.run({{tokens, n}, sequences, states, out_rows, logits.data(), std::move(should_stop), {}, per_slot});
    return logits;
  }
  // Logits of all tokens, in passes of the given sizes.
  std::vector<float> run(const std::vector<int32_t>& tokens, const std::vector<uint32_t>& sizes, DType kv_type,
                         bool per_slot = false) {
    SessionState state(program, static_cast<uint32_t>(tokens.size()), kv_type);
    std::vector<float> all;
    for (uint32_t n : sizes) {
      const std::vector<float> logits = pass(state, tokens.data() + state.length(), n, nullptr, per_slot);
      all.insert(all.end(), logits.begin(), logits.end());
    }
    return all;
  }
};

std::vector<int32_t> random_tokens(uint32_t n, uint32_t vocab, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<int32_t> tokens(n);
  for (int32_t& t : tokens) t = static_cast<int32_t>(random() % vocab);
  return tokens;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

bool is_sane(const std::vector<float>& logits) {
  float least = logits[0], most = logits[0];
  for (float v : logits) {
    if (!std::isfinite(v)) return false;
    least = std::min(least, v), most = std::max(most, v);
  }
  return most - least > 0.1f;
}

const std::vector<std::vector<uint32_t>> kSplits = {{20}, std::vector<uint32_t>(20, 1), {7, 13}, {1, 5, 2, 12}};

}  // namespace

TEST("every way to cut, divide and hold a model gives the plain computation's bits") {
  const TinySpec specs[] = {
      {},
      {.dense = kQ8, .experts = {{kQ8, kQ8, kQ8}}},
      {.hidden = 52,
       .num_q = 6,
       .num_kv = 3,
       .head_dim = 14,
       .rotary = 8,
       .num_experts = 5,
       .top_k = 2,
       .width = 41,
       .vocab = 33,
       .norm_heads = true,
       .style = RopeStyle::kNorm,
       .dense = kF32,
       .head = kBF16,
       .table = kF32,
       .experts = {{kF32, kF32, kF32}, {kF16, kBF16, kF16}}},
      {.num_q = 2,
       .num_kv = 2,
       .width = 64,
       .window = 6,
       .normalize = false,
       .dense = kBF16,
       .head = kF16,
       .table = kQ8,
       .experts = {{kQ4, kQ8, kF16}, {kF32, kF16, kQ8}, {kQ8, kQ8, kQ4}}},
  };
  for (const TinySpec& spec : specs) {
    TinyModel model(spec);
    const std::vector<int32_t> tokens = random_tokens(20, spec.vocab, 3);
    const DType kv_type = spec.dense == kF32 ? kF32 : kF16;
    const std::vector<float> expected = model.reference(tokens, kv_type);
    CHECK(is_sane(expected));
    const uint64_t one = model.largest_record(), all = model.all_records();
    struct Case {
      uint32_t capacity;
      uint64_t arena;
      uint32_t threads;
    };
    for (const Case& c : {Case{1, one, 1},
                          {2, 3 * one, 2},
                          {7, all, 3},
                          {spec.top_k, one, 4},
                          {1000, one, 2},
                          {1000, 5 * one, 1},
                          {60, all, 4}}) {
      Runner runner(model, 20, c.capacity, c.arena, c.threads);
      for (const auto& split : kSplits)
        for (bool per_slot : {false, true}) CHECK(same_bits(runner.run(tokens, split, kv_type, per_slot), expected));
    }
  }
}

TEST("a pass over several sequences gives each its own logits") {
  TinyModel model({});
  Runner runner(model, 30, 20, model.all_records(), 2);
  const std::vector<int32_t> a = random_tokens(9, 77, 1), b = random_tokens(12, 77, 2);
  const std::vector<float> a_logits = model.reference(a, kF16), b_logits = model.reference(b, kF16);
  SessionState a_state(runner.program, 9, kF16), b_state(runner.program, 16, kF16);
  runner.pass(a_state, a.data(), 2);  // sequences may start from different lengths
  std::vector<int32_t> tokens;
  std::vector<uint32_t> sequences, out_rows;
  for (uint32_t i = 0; i < 12; ++i) {
    if (i + 2 < 9) tokens.push_back(a[i + 2]), sequences.push_back(1);
    tokens.push_back(b[i]), sequences.push_back(0);
  }
  for (uint32_t row = 0; row < tokens.size(); row += 3) out_rows.push_back(row);
  std::vector<float> logits(out_rows.size() * 77);
  SessionState* states[] = {&b_state, &a_state};
  runner.executor.run({tokens, sequences, states, out_rows, logits.data(), nullptr});
  CHECK_EQ(a_state.length(), 9u);
  CHECK_EQ(b_state.length(), 12u);
  for (size_t o = 0; o < out_rows.size(); ++o) {
    const uint32_t sequence = sequences[out_rows[o]];
    const size_t before = std::count(sequences.begin(), sequences.begin() + out_rows[o], sequence);
    const float* expected = sequence == 0 ? &b_logits[before * 77] : &a_logits[(before + 2) * 77];
    CHECK(std::memcmp(&logits[o * 77], expected, 77 * sizeof(float)) == 0);
  }
}

// Log-probabilities of `targets` after each row of one pass over several states.
std::vector<float> score(Runner& runner, const std::vector<int32_t>& tokens, const std::vector<uint32_t>& sequences,
                         std::vector<SessionState*> states, const std::vector<uint32_t>& out_rows,
                         const std::vector<int32_t>& targets) {
  std::vector<float> log_probs(targets.size(), 1.0f);
  Pass pass{tokens, sequences, states, out_rows, nullptr, nullptr};
  pass.targets = targets;
  pass.log_probs = log_probs.data();
  runner.executor.run(pass);
  return log_probs;
}

// The same from a row of logits: pieces of 256 columns, as op_output.cc has them.
float log_prob_of(const float* logits, uint32_t vocab, int32_t target) {
  std::vector<float> maxima, sums;
  for (uint32_t col = 0; col < vocab; col += 256) {
    maxima.push_back(0), sums.push_back(0);
    kernels().sum_exp(logits + col, std::min(256u, vocab - col), &maxima.back(), &sums.back());
  }
  return kernels().log_prob(logits[target], maxima.data(), sums.data(), static_cast<uint32_t>(maxima.size()));
}

TEST("log-probabilities are those of the logits, however a pass is cut, divided and held") {
  for (const TinySpec& spec : {TinySpec{.num_layers = 1, .vocab = 700},
                               {.num_layers = 1, .vocab = 256, .head = kBF16},
                               {.num_layers = 1, .vocab = 33, .dense = kF32, .head = kF32}}) {
    TinyModel model(spec);
    const std::vector<int32_t> tokens = random_tokens(301, spec.vocab, 3), targets = random_tokens(301, spec.vocab, 4);
    const std::vector<float> logits = model.reference(tokens, kF16);
    std::vector<float> expected;
    for (size_t i = 0; i < tokens.size(); ++i) {
      expected.push_back(log_prob_of(&logits[i * spec.vocab], spec.vocab, targets[i]));
      double sum = 0;
      for (uint32_t v = 0; v < spec.vocab; ++v) sum += std::exp(double{logits[i * spec.vocab + v]});
      CHECK(std::abs(expected.back() - (logits[i * spec.vocab + targets[i]] - std::log(sum))) < 1e-5);
    }
    for (uint32_t threads : {1u, 3u}) {
      Runner runner(model, 301, 100, model.largest_record(), threads);
      for (const std::vector<uint32_t>& sizes :
           {std::vector<uint32_t>{301}, {255, 46}, {1, 65, 200, 35}, std::vector<uint32_t>(43, 7)}) {
        SessionState state(runner.program, 301, kF16);
        std::vector<float> got;
        size_t at = 0;
        for (uint32_t n : sizes) {
          std::vector<uint32_t> out_rows(n);
          std::iota(out_rows.begin(), out_rows.end(), 0);
          const auto part = [&](const std::vector<int32_t>& v) {
            return std::vector<int32_t>(v.begin() + at, v.begin() + at + n);
          };
          const std::vector<float> log_probs =
              score(runner, part(tokens), std::vector<uint32_t>(n, 0), {&state}, out_rows, part(targets));
          got.insert(got.end(), log_probs.begin(), log_probs.end());
          at += n;
        }
        CHECK(same_bits(got, expected));
      }
    }
  }
}

TEST("rows without a target, and wrong targets") {
  TinyModel model({});
  Runner runner(model, 8, 100, model.all_records(), 2);
  const std::vector<int32_t> tokens = random_tokens(8, 77, 5);
  const std::vector<float> logits = model.reference(tokens, kF16);
  const std::vector<uint32_t> sequences(8, 0);
  SessionState state(runner.program, 16, kF16);
  const std::vector<float> got = score(runner, tokens, sequences, {&state}, {2, 7}, {5, 76});
  CHECK(same_bits(got, {log_prob_of(&logits[2 * 77], 77, 5), log_prob_of(&logits[7 * 77], 77, 76)}));
  CHECK_THROWS(Error, "target 77", score(runner, tokens, sequences, {&state}, {0, 1}, {1, 77}));
  CHECK_THROWS(Error, "target -1", score(runner, tokens, sequences, {&state}, {0}, {-1}));
  CHECK_THROWS(Error, "1 targets for 2 rows", score(runner, tokens, sequences, {&state}, {0, 1}, {1}));
  CHECK_EQ(state.length(), 8u);
}

// A prefix and what continues it: in one pass, or in several; the prefix ends anywhere in a block of keys.
TEST("states that continue another give the bits of whole texts") {
  for (DType kv_type : {kF16, kF32}) {
    TinyModel model({.num_layers = 2, .window = kv_type == kF32 ? 70u : 0u});
    Runner runner(model, 400, 100, model.all_records(), 3);
    SessionState room(runner.program, 240, kv_type);
    for (uint32_t length : {1u, 5u, 16u, 63u, 64u, 65u, 100u, 128u, 150u}) {
      const std::vector<int32_t> prefix = random_tokens(length, 77, length);
      std::vector<std::vector<int32_t>> rests;
      for (uint32_t n : {1u, 9u, 20u}) rests.push_back(random_tokens(n, 77, 100 + n));
      std::vector<float> expected;
      for (const auto& rest : rests) {
        std::vector<int32_t> whole = prefix;
        whole.insert(whole.end(), rest.begin(), rest.end());
        const std::vector<float> logits = model.reference(whole, kv_type);
        for (size_t i = 0; i < rest.size(); ++i)
          expected.push_back(log_prob_of(&logits[(length + i) * 77], 77, static_cast<int32_t>(i)));
      }
      // cut: rows before it are a pass of their own.
      for (uint32_t cut : {0u, length, length / 2, length + 3, length + 12}) {
        SessionState base(runner.program, 150, kv_type);
        std::vector<std::unique_ptr<SessionState>> parts;
        std::vector<SessionState*> states = {&base};
        uint32_t first = 0;
        for (const auto& rest : rests) {
          const uint32_t rows = (length % 64 + static_cast<uint32_t>(rest.size()) + 15) / 16 * 16;
          parts.push_back(std::make_unique<SessionState>(room, first, rows, &base, length));
          states.push_back(parts.back().get());
          CHECK_EQ(parts.back()->length(), length);
          first += rows;
        }
        CHECK(first <= room.capacity());
        std::vector<int32_t> tokens = prefix, targets;
        std::vector<uint32_t> sequences(length, 0), out_rows;
        for (uint32_t s = 0; s < rests.size(); ++s) {
          for (size_t i = 0; i < rests[s].size(); ++i) {
            out_rows.push_back(static_cast<uint32_t>(tokens.size()));
            targets.push_back(static_cast<int32_t>(i));
            tokens.push_back(rests[s][i]);
            sequences.push_back(s + 1);
          }
        }
        std::vector<float> got;
        const uint32_t end = static_cast<uint32_t>(tokens.size());
        for (const auto& [from, to] : {std::pair{0u, cut}, {cut, end}}) {
          if (from == to) continue;
          std::vector<uint32_t> rows;
          std::vector<int32_t> wanted;
          for (size_t i = 0; i < out_rows.size(); ++i)
            if (out_rows[i] >= from && out_rows[i] < to)
              rows.push_back(out_rows[i] - from), wanted.push_back(targets[i]);
          const std::vector<int32_t> pass_tokens(tokens.begin() + from, tokens.begin() + to);
          const std::vector<uint32_t> pass_sequences(sequences.begin() + from, sequences.begin() + to);
          if (rows.empty()) {
            runner.executor.run({pass_tokens, pass_sequences, states, {}, nullptr, nullptr});
          } else {
            const std::vector<float> log_probs = score(runner, pass_tokens, pass_sequences, states, rows, wanted);
            got.insert(got.end(), log_probs.begin(), log_probs.end());
          }
        }
        CHECK(same_bits(got, expected));
      }
    }
  }
}

TEST("a state cannot continue what is not there") {
  TinyModel model({});
  Runner runner(model, 8, 100, model.all_records(), 1);
  SessionState room(runner.program, 64, kF16), base(runner.program, 70, kF16), wide(runner.program, 64, kF32);
  const std::vector<int32_t> tokens = {1, 2};
  runner.pass(base, tokens.data(), 2);
  SessionState part(room, 16, 32, &base, 3);
  CHECK_EQ(part.capacity(), 32u);
  CHECK_THROWS(Error, "continues 3 positions of a state that holds 2", runner.pass(part, tokens.data(), 2));
  CHECK_THROWS(Error, "the base has 3", part.rollback(2));
  for (const auto& [first, rows] : {std::pair{0u, 80u}, {48u, 32u}, {8u, 16u}, {16u, 17u}, {16u, 0u}, {~15u, 32u}})
    CHECK_THROWS(Error, "multiples of 16 inside it", SessionState(room, first, rows, nullptr, 0));
  CHECK_THROWS(Error, "cannot continue 71", SessionState(room, 0, 16, &base, 71));
  CHECK_THROWS(Error, "cannot continue 60", SessionState(room, 0, 48, &base, 60));
  CHECK_THROWS(Error, "cannot continue", SessionState(room, 0, 16, &part, 1));
  CHECK_THROWS(Error, "cannot continue", SessionState(room, 0, 16, &wide, 1));
  CHECK_THROWS(Error, "no base", SessionState(room, 0, 16, nullptr, 1));
  CHECK_EQ(SessionState(room, 0, 16, &base, 64).capacity(), 80u);
}

TEST("a rolled-back sequence continues as if the tokens had never been") {
  TinyModel model({});
  Runner runner(model, 8, 100, model.largest_record() * 4, 2);
  const std::vector<int32_t> tokens = random_tokens(10, 77, 5), other = random_tokens(6, 77, 6);
  const std::vector<float> expected = model.reference(tokens, kF16);
  SessionState state(runner.program, 12, kF16);
  runner.pass(state, tokens.data(), 4);
  runner.pass(state, other.data(), 6);
  state.rollback(4);
  const std::vector<float> rest = runner.pass(state, tokens.data() + 4, 6);
  CHECK(std::equal(rest.begin(), rest.end(), expected.begin() + 4 * 77));
  CHECK_THROWS(Error, "rollback to 11", state.rollback(11));
}

// Rows and columns so many that matmul_rows cuts both.
TEST("a product larger than the caches is cut without a trace") {
  for (DType type : {kF32, kQ4}) {
    const uint32_t cols = 12288, rows = 200, n = 71;
    ProgramBuilder b(n, n);
    const uint32_t table = b.weight(WeightRole::kTable, kF32, 5, cols);
    const uint32_t matrix = b.weight(WeightRole::kMatrix, type, rows, cols);
    const Program program = parse_program(b.bytes(b.select_rows(b.linear(b.embed(table), matrix))));

    std::mt19937 random(9);
    std::vector<uint8_t> file(5 * cols * 4 + rows * row_bytes(type, cols));
    auto floats = reinterpret_cast<float*>(file.data());
    for (size_t i = 0; i < file.size() / 4; ++i) floats[i] = static_cast<float>(random() % 2001) / 1000 - 1;
    if (type == kQ4)
      for (size_t at = 5 * cols * 4; at < file.size(); at += 18) file[at + 1] = 0x20;  // scales that are finite
    TempFile path(file);
    Weights weights(program);
    weights.set_table(table, path.path(), 0, cols * 4, false);
    weights.load(matrix, "w", path.path(), 5 * cols * 4, rows * row_bytes(type, cols), type, false, false, 0);

    const std::vector<int32_t> tokens = random_tokens(n, 5, 1);
    std::vector<float> expected;
    for (uint32_t threads : {1u, 3u}) {
      Executor executor(program, weights, nullptr, threads);
      SessionState state(program, n, kF16);
      SessionState* states[] = {&state};
      const std::vector<uint32_t> sequences(n, 0);
      std::vector<uint32_t> out_rows(n);
      for (uint32_t i = 0; i < n; ++i) out_rows[i] = i;
      std::vector<float> logits(n * rows);
      executor.run({tokens, sequences, states, out_rows, logits.data(), nullptr});
      for (uint32_t row = 0; row < n; ++row) {
        std::vector<uint8_t> q8(q8_row_bytes(cols));
        kernels().quantize(floats + tokens[row] * cols, cols, 0, cols / 32, q8.data());
        const void* x = type == kF32 ? static_cast<const void*>(floats + tokens[row] * cols) : q8.data();
        std::vector<float> y(rows);
        float* out = y.data();
        kernels().matmul(weights.matrix(matrix), &x, 1, &out, 0, num_tiles(rows));
        CHECK(std::memcmp(&logits[row * rows], y.data(), rows * sizeof(float)) == 0);
      }
    }
  }
}

// Linears of one value run as one job: six of them, of all types and of row counts that end inside a tile, their
// outputs brought to one width and added.
TEST("linears of one value give each its own product, whatever their types and rows") {
  const uint32_t cols = 64, width = 21, max_rows = 40;
  struct Linear {
    DType type;
    uint32_t rows;
    uint32_t weight = 0, back = 0;
  };
  for (std::vector<Linear> linears :
       {std::vector<Linear>{{kQ4, 1}, {kQ8, 16}, {kQ4, 333}, {kQ8, 47}, {kQ8, 15}, {kQ4, 33}},
        std::vector<Linear>{{kF32, 3}, {kBF16, 160}, {kF16, 17}, {kF32, 1}, {kBF16, 31}, {kF16, 900}}}) {
    ProgramBuilder b(max_rows, max_rows);
    const uint32_t table = b.weight(WeightRole::kTable, kF32, 5, cols);
    const uint32_t x = b.as_input(b.embed(table), linears[0].type);
    std::vector<uint32_t> outputs;
    for (Linear& l : linears) {
      l.weight = b.weight(WeightRole::kMatrix, l.type, l.rows, cols);
      outputs.push_back(b.linear(x, l.weight));
    }
    uint32_t sum = 0;
    for (size_t i = 0; i < linears.size(); ++i) {
      linears[i].back = b.weight(WeightRole::kMatrix, kF32, width, linears[i].rows);
      const uint32_t y = b.linear(outputs[i], linears[i].back);
      sum = i == 0 ? y : b.add(sum, y);
    }
    const Program program = parse_program(b.bytes(b.select_rows(sum)));
    CHECK_EQ(linears_from(program, is_quantized(linears[0].type) ? 2 : 1).size(), kMostLinears);

    std::mt19937 random(4);
    std::vector<uint8_t> file;
    const auto put_floats = [&](size_t n) {
      const size_t at = file.size();
      file.resize(at + 4 * n);
      for (size_t i = 0; i < n; ++i) {
        const float v = static_cast<float>(random() % 2001) / 1000 - 1;
        std::memcpy(&file[at + 4 * i], &v, sizeof v);
      }
      return at;
    };
    const auto put_rows = [&](DType type, uint32_t rows) {
      if (type == kF32) return put_floats(size_t{rows} * cols);
      const size_t at = file.size(), step = type == kQ4 ? 18 : type == kQ8 ? 34 : 2;
      file.resize(at + rows * row_bytes(type, cols));
      for (size_t i = at; i < file.size(); ++i) file[i] = static_cast<uint8_t>(random());
      for (size_t i = at; i < file.size(); i += step)  // ordinary magnitudes
        file[i + 1] = static_cast<uint8_t>((random() & 0x80) | (type == kBF16 ? 0x3e : 0x2c));
      return at;
    };
    std::vector<size_t> at, back_at;
    put_floats(5 * cols);
    for (const Linear& l : linears)
      at.push_back(put_rows(l.type, l.rows)), back_at.push_back(put_floats(width * l.rows));
    const TempFile path(file);
    Weights weights(program);
    weights.set_table(table, path.path(), 0, cols * 4, false);
    for (size_t i = 0; i < linears.size(); ++i) {
      const Linear& l = linears[i];
      weights.load(l.weight, "w", path.path(), at[i], l.rows * row_bytes(l.type, cols), l.type, false, false, 0);
      weights.load(l.back, "b", path.path(), back_at[i], size_t{4} * width * l.rows, kF32, false, false, 0);
    }
    const auto product = [&](uint32_t weight, const void* in) {
      const Matrix w = weights.matrix(weight);
      std::vector<float> y(w.rows);
      float* out = y.data();
      kernels().matmul(w, &in, 1, &out, 0, num_tiles(w.rows));
      return y;
    };
    std::vector<std::vector<float>> by_token;
    for (uint32_t token = 0; token < 5; ++token) {
      std::vector<float> row(cols), total;
      std::memcpy(row.data(), &file[token * cols * 4], cols * 4);
      std::vector<uint8_t> q8(q8_row_bytes(cols));
      kernels().quantize(row.data(), cols, 0, cols / kQuantBlock, q8.data());
      for (const Linear& l : linears) {
        const std::vector<float> h =
            product(l.weight, is_quantized(l.type) ? static_cast<const void*>(q8.data()) : row.data());
        const std::vector<float> y = product(l.back, h.data());
        if (total.empty()) total.assign(width, -0.0f);
        for (uint32_t i = 0; i < width; ++i) total[i] = total[i] + y[i];
      }
      by_token.push_back(total);
    }
    for (uint32_t threads : {1u, 2u, 3u, 7u}) {
      Executor executor(program, weights, nullptr, threads);
      for (uint32_t n : {1u, 2u, 15u, max_rows}) {
        SessionState state(program, max_rows, kF16);
        SessionState* states[] = {&state};
        const std::vector<int32_t> tokens = random_tokens(n, 5, n);
        const std::vector<uint32_t> sequences(n, 0);
        executor.run({tokens, sequences, states, {}, nullptr, nullptr});  // no logits wanted
        state.rollback(0);
        std::vector<uint32_t> out_rows(n);
        std::iota(out_rows.begin(), out_rows.end(), 0);
        std::vector<float> logits(n * width), want;
        executor.run({tokens, sequences, states, out_rows, logits.data(), nullptr});
        for (int32_t token : tokens) want.insert(want.end(), by_token[token].begin(), by_token[token].end());
        CHECK(is_sane(want) && same_bits(logits, want));
      }
    }
  }
}

// A value that nobody reads may share its memory with the next one: run as one job, their linears would race.
TEST("a linear whose output is not used leaves the next one's alone") {
  const uint32_t cols = 64, rows = 1600, n = 3;
  ProgramBuilder b(n, n);
  const uint32_t table = b.weight(WeightRole::kTable, kF32, 5, cols);
  const uint32_t unused_weight = b.weight(WeightRole::kMatrix, kF32, rows, cols);
  const uint32_t weight = b.weight(WeightRole::kMatrix, kF32, rows, cols);
  const uint32_t x = b.embed(table);
  b.linear(x, unused_weight);
  const uint32_t used = b.linear(x, weight);
  b.move_back(used, 16 * 64);  // one writes there first, the other last
  const Program program = parse_program(b.bytes(b.select_rows(used)));
  CHECK_EQ(linears_from(program, 1).size(), 1u);  // after the embedding
  CHECK_EQ(linears_from(program, 2).size(), 1u);

  std::vector<float> file(5 * cols + 2 * rows * cols);
  std::mt19937 random(4);
  for (float& v : file) v = static_cast<float>(random() % 2001) / 1000 - 1;
  const uint8_t* bytes = reinterpret_cast<const uint8_t*>(file.data());
  const TempFile path({bytes, bytes + file.size() * sizeof(float)});
  Weights weights(program);
  weights.set_table(table, path.path(), 0, cols * 4, false);
  for (uint32_t i = 0; i < 2; ++i)
    weights.load(i == 0 ? unused_weight : weight, "w", path.path(), 4 * cols * (5 + i * rows), 4 * rows * cols, kF32,
                 false, false, 0);
  for (uint32_t threads : {1u, 2u, 3u}) {
    Executor executor(program, weights, nullptr, threads);
    SessionState state(program, n, kF16);
    SessionState* states[] = {&state};
    const std::vector<int32_t> tokens = {4, 0, 2};
    const std::vector<uint32_t> sequences(n, 0), out_rows = {0, 1, 2};
    std::vector<float> logits(n * rows);
    executor.run({tokens, sequences, states, out_rows, logits.data(), nullptr});
    for (uint32_t row = 0; row < n; ++row) {
      const void* in = &file[tokens[row] * cols];
      std::vector<float> y(rows);
      float* out = y.data();
      kernels().matmul(weights.matrix(weight), &in, 1, &out, 0, num_tiles(rows));
      CHECK(std::memcmp(&logits[row * rows], y.data(), rows * sizeof(float)) == 0);
    }
  }
}

TEST("a cancelled pass changes nothing") {
  TinyModel model({});
  const std::vector<int32_t> tokens = random_tokens(12, 77, 4);
  const std::vector<float> expected = model.reference(tokens, kF16);
  for (uint32_t capacity : {5u, 100u}) {
    Runner runner(model, 12, capacity, 2 * model.largest_record(), 2);
    SessionState state(runner.program, 12, kF16);
    runner.pass(state, tokens.data(), 3);
    uint32_t polls = 0;
    SessionState counted(runner.program, 12, kF16);
    runner.pass(counted, tokens.data(), 12, [&] { return ++polls, false; });
    CHECK(polls > 50);
    uint32_t cancelled = 0;
    for (uint32_t stop_at = 0; stop_at < polls; stop_at += 1 + polls / 40) {
      uint32_t poll = 0;
      try {
        runner.pass(state, tokens.data() + 3, 9, [&] { return poll++ == stop_at; });
        state.rollback(3);  // this pass asked less often than the counted one
      } catch (const Cancelled&) {
        ++cancelled;
      }
      CHECK_EQ(state.length(), 3u);
    }
    CHECK(cancelled > 10);
    const std::vector<float> rest = runner.pass(state, tokens.data() + 3, 9);
    CHECK(std::equal(rest.begin(), rest.end(), expected.begin() + 3 * 77));
  }
}

TEST("a failed read ends the pass, changes nothing, and the next pass works") {
  TinyModel model({});
  const std::vector<int32_t> tokens = random_tokens(8, 77, 4);
  const std::vector<float> expected = model.reference(tokens, kF16);
  Runner runner(model, 8, 100, 2 * model.largest_record(), 2);
  SessionState state(runner.program, 8, kF16);
  for (int fail_at : {0, 3, 11, 20}) {
    std::atomic<int> reads{0};
    set_read_hook([&](const std::string&, uint64_t, uint64_t) { return reads++ == fail_at ? EIO : 0; });
    CHECK_THROWS(Error, "/", runner.pass(state, tokens.data(), 8));
    set_read_hook(nullptr);
    CHECK_EQ(state.length(), 0u);
    CHECK(same_bits(runner.pass(state, tokens.data(), 8), expected));
    state.rollback(0);
  }
}

TEST("a pass runs the shortest program that has room, in scratch that is no larger") {
  TinyModel model({});
  const std::vector<int32_t> tokens = random_tokens(20, 77, 4);
  const std::vector<float> expected = model.reference(tokens, kF16);
  const std::vector<uint32_t> rows = {2, 5, 400};
  std::vector<Program> programs;
  for (uint32_t n : rows) programs.push_back(model.program(n, n, 3 * n));
  const std::unique_ptr<Weights> weights = model.load(programs[2]);
  ExpertMemory memory(model.source(), {.arena_bytes = 2 * model.largest_record()});
  Executor executor(programs[2], *weights, &memory, 2, {programs[0], programs[1]});
  const auto pages = [](uint64_t bytes) { return round_up(bytes, kPage); };
  CHECK_EQ(executor.scratch_bytes(), pages(programs[2].scratch_bytes));

  // Every size of scratch with every size of pass.
  for (const uint32_t scratch_rows : {400u, 2u, 5u, 3u, 1u, 20u}) {
    executor.resize_scratch(scratch_rows);
    const uint32_t room = *std::ranges::lower_bound(rows, scratch_rows);
    const size_t i = static_cast<size_t>(std::ranges::find(rows, room) - rows.begin());
    CHECK_EQ(executor.scratch_bytes(), pages(programs[i].scratch_bytes));
    for (const uint32_t n : {1u, 2u, 3u, 5u, 6u, 20u}) {
      SessionState state(programs[0], 20, kF16);
      std::vector<float> all(20 * 77);
      SessionState* states[] = {&state};
      for (uint32_t at = 0; at < 20;) {
        const uint32_t size = std::min(n, 20 - at);
        std::vector<uint32_t> sequences(size, 0), out_rows(size);
        std::iota(out_rows.begin(), out_rows.end(), 0);
        const Pass pass = {{&tokens[at], size}, sequences, states, out_rows, &all[at * 77], nullptr};
        if (size > room && pages(programs[i].scratch_bytes) < pages(programs[size > 5 ? 2 : 1].scratch_bytes)) {
          CHECK_THROWS(Error, "resize_scratch", executor.run(pass));
          break;
        }
        executor.run(pass);
        at += size;
        if (at == 20) CHECK(same_bits(all, expected));
      }
    }
  }

  const auto make = [&](std::vector<Program> shorter) { Executor(programs[1], *weights, &memory, 1, shorter); };
  make({programs[0]});
  CHECK_THROWS(Error, "ever more rows", make({programs[1]}));
  CHECK_THROWS(Error, "ever more rows", make({programs[2]}));
  TinyModel other({.num_layers = 1});
  CHECK_THROWS(Error, "another model", make({other.program(2, 2, 6)}));
}

TEST("a pass that does not fit the program is refused before it starts") {
  TinyModel model({});
  Runner runner(model, 6, 20, model.largest_record(), 1);
  SessionState state(runner.program, 5, kF16), other(runner.program, 5, kF32);
  const std::vector<int32_t> tokens(7, 1);
  const std::vector<uint32_t> zeros(7, 0);
  std::vector<float> logits(7 * 77);
  auto run = [&](uint32_t n, std::vector<uint32_t> sequences, std::vector<SessionState*> states,
                 std::vector<uint32_t> out_rows, std::vector<int32_t> tokens_in = std::vector<int32_t>(7, 1)) {
    runner.executor.run({{tokens_in.data(), n}, sequences, states, out_rows, logits.data(), nullptr});
  };
  CHECK_THROWS(Error, "0 rows", run(0, {}, {&state}, {}));
  CHECK_THROWS(Error, "7 rows, expected 1 to 6", run(7, zeros, {&state}, {}));
  CHECK_THROWS(Error, "7 sequences for 2 rows", run(2, zeros, {&state}, {}));
  CHECK_THROWS(Error, "context of 5", run(6, std::vector<uint32_t>(6, 0), {&state}, {}));
  CHECK_THROWS(Error, "sequence 1", run(2, {0, 1}, {&state}, {}));
  CHECK_THROWS(Error, "given twice", run(2, {0, 1}, {&state, &state}, {}));
  CHECK_THROWS(Error, "another model", run(1, {0}, {nullptr}, {}));
  CHECK_THROWS(Error, "ascending", run(2, {0, 0}, {&state}, {1, 0}));
  CHECK_THROWS(Error, "output row 2", run(2, {0, 0}, {&state}, {2}));
  CHECK_THROWS(Error, "vocabulary of 77", run(1, {0}, {&state}, {}, {77}));
  CHECK_THROWS(Error, "token -1", run(1, {0}, {&state}, {}, {-1}));
  CHECK_EQ(state.length(), 0u);
  run(2, {1, 0}, {&state, &other}, {});  // no logits wanted, mixed key types
  CHECK_EQ(state.length() + other.length(), 2u);

  TinyModel wider({.head_dim = 32, .rotary = 32});
  SessionState foreign(wider.program(6, 6, 20), 5, kF16);
  CHECK_THROWS(Error, "another model", run(1, {0}, {&foreign}, {}));
}

// The sanitizers watch: whatever parses either runs or is refused.
TEST("a program with flipped bytes that still parses is safe to run") {
  TinyModel model({.num_layers = 1});
  const std::vector<uint8_t> good = model.program_bytes(4, 4, 5);
  const Program original = parse_program(good);
  const auto weights = model.load(original);
  ExpertMemory memory(model.source(), {.arena_bytes = model.all_records()});
  std::mt19937 random(2);
  int ran = 0, refused = 0;
  for (int i = 0; i < 3000; ++i) {
    std::vector<uint8_t> bytes = good;
    bytes[random() % bytes.size()] ^= 1u << random() % 8;
    try {
      const Program program = parse_program(bytes);
      const bool same_weights = std::equal(program.weights.begin(), program.weights.end(), original.weights.begin(),
                                           original.weights.end(), [](const WeightInfo& a, const WeightInfo& b) {
                                             return a.rows == b.rows && a.cols == b.cols && a.dtype == b.dtype;
                                           });
      if (!same_weights || program.scratch_bytes > 1 << 24 || program.max_rows > 64) continue;
      Executor executor(program, *weights, &memory, 2);
      SessionState state(program, 8, kF16);
      SessionState* states[] = {&state};
      const std::vector<int32_t> tokens = {1, 76, 1};
      const std::vector<uint32_t> sequences(3, 0), out_rows = {0};
      std::vector<float> logits(program.values[program.logits].width);
      executor.run({tokens, sequences, states, out_rows, logits.data(), nullptr});
      ++ran;
    } catch (const Error&) {
      ++refused;
    }
  }
  CHECK(ran > 30 && refused > 1000);
}

TEST("routing is told and asked, row by row, whatever the pass") {
  TinyModel model({});
  const std::vector<int32_t> tokens = random_tokens(20, 77, 8);
  const uint32_t num_layers = 3, num_experts = 8, top_k = 3, num_rows = 20;
  Runner runner(model, num_rows, 7, 3 * model.largest_record(), 3);
  const RoutingShape shape = runner.executor.routing();
  CHECK(shape.num_layers == num_layers && shape.num_experts == num_experts && shape.top_k == top_k && shape.all_rows);

  struct Routes {
    std::vector<int32_t> ids = std::vector<int32_t>(num_layers * num_rows * top_k, -1);  // [layers, rows, top_k]
    std::vector<float> weights = std::vector<float>(ids.size()), scores = weights;
  };
  // The pass's rows of `all`, as a tap wants them, and back.
  const auto slice = [&](const auto& all, uint32_t begin, uint32_t n) {
    std::decay_t<decltype(all)> part;
    for (uint32_t l = 0; l < num_layers; ++l)
      part.insert(part.end(), &all[(l * num_rows + begin) * top_k], &all[(l * num_rows + begin) * top_k] + n * top_k);
    return part;
  };
  const auto put = [&](const auto& part, auto& all, uint32_t begin, uint32_t n) {
    for (uint32_t l = 0; l < num_layers; ++l)
      std::copy_n(&part[l * n * top_k], n * top_k, &all[(l * num_rows + begin) * top_k]);
  };
  const auto run = [&](const std::vector<uint32_t>& sizes, const std::vector<int32_t>* forced, Routes& out) {
    SessionState state(runner.program, num_rows, kF16);
    SessionState* states[] = {&state};
    std::vector<float> logits(num_rows * 77);
    for (uint32_t n : sizes) {
      const uint32_t begin = state.length();
      const std::vector<uint32_t> sequences(n, 0);
      std::vector<uint32_t> out_rows(n);
      for (uint32_t i = 0; i < n; ++i) out_rows[i] = i;
      const std::vector<int32_t> routes = forced ? slice(*forced, begin, n) : std::vector<int32_t>();
      std::vector<int32_t> ids(num_layers * n * top_k);
      std::vector<float> weights(ids.size()), scores(ids.size());
      runner.executor.run({{&tokens[begin], n},
                           sequences,
                           states,
                           out_rows,
                           &logits[begin * 77],
                           nullptr,
                           {routes, ids, weights, scores}});
      put(ids, out.ids, begin, n), put(weights, out.weights, begin, n), put(scores, out.scores, begin, n);
    }
    return logits;
  };

  // Asked only: the logits are those of a pass that was not asked, and the answer does not depend on the cut.
  Routes asked, other;
  const std::vector<float> expected = model.reference(tokens, kF16);
  CHECK(same_bits(run({20}, nullptr, asked), expected));
  for (const auto& split : kSplits) {
    CHECK(same_bits(run(split, nullptr, other), expected));
    CHECK(other.ids == asked.ids && same_bits(other.weights, asked.weights) && same_bits(other.scores, asked.scores));
  }
  for (size_t i = 0; i < asked.ids.size(); i += top_k) {  // weights are the softmax of the scores (they are normalized)
    float sum = 0;
    for (uint32_t j = 0; j < top_k; ++j) sum += asked.weights[i + j];
    CHECK(std::abs(sum - 1) < 1e-5f);
    CHECK(std::abs(asked.weights[i] / asked.weights[i + 1] - std::exp(asked.scores[i] - asked.scores[i + 1])) < 1e-3f);
  }
  // Told: used as they are, with even weights, at every cut.
  std::mt19937 random(3);
  std::vector<int32_t> forced;
  while (forced.size() < asked.ids.size()) {
    std::vector<int32_t> row = {0, 1, 2, 3, 4, 5, 6, 7};
    std::shuffle(row.begin(), row.end(), random);
    std::sort(row.begin(), row.begin() + top_k);
    forced.insert(forced.end(), row.begin(), row.begin() + top_k);
  }
  const std::vector<float> told = run({20}, &forced, other);
  CHECK(is_sane(told) && !same_bits(told, expected));
  CHECK(other.ids == forced);
  for (float w : other.weights) CHECK_EQ(w, 1.0f / 3);
  for (const auto& split : kSplits) CHECK(same_bits(run(split, &forced, other), told));
}

TEST("routes that do not fit the program are refused before the pass starts") {
  TinyModel model({});
  Runner runner(model, 4, 20, model.all_records(), 1);
  SessionState state(runner.program, 8, kF16);
  SessionState* states[] = {&state};
  const std::vector<int32_t> tokens = {1, 2};
  const std::vector<uint32_t> sequences = {0, 0};
  const std::vector<int32_t> good = {0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5, 5, 6, 7, 0, 6, 7};
  std::vector<int32_t> ids(18);
  std::vector<float> weights(18), scores(18);
  const auto run = [&](RoutingTap tap) { runner.executor.run({tokens, sequences, states, {}, nullptr, nullptr, tap}); };
  const auto forced_with = [&](size_t at, int32_t id) {
    std::vector<int32_t> routes = good;
    routes[at] = id;
    run({routes, {}, {}, {}});
  };
  CHECK_THROWS(Error, "17 routes, expected 3 layers x 2 rows x 3", run({{good.data(), 17}, {}, {}, {}}));
  CHECK_THROWS(Error, "layer 2, row 0: route to expert 8, expected", forced_with(14, 8));
  CHECK_THROWS(Error, "layer 0, row 0: route to expert -1", forced_with(0, -1));
  CHECK_THROWS(Error, "layer 1, row 1: route to expert 3, expected ascending", forced_with(10, 3));
  CHECK_THROWS(Error, "captured whole", run({good, ids, weights, {}}));
  CHECK_THROWS(Error, "16 routes", run({{}, ids, weights, {scores.data(), 16}}));
  CHECK_EQ(state.length(), 0u);
  run({good, ids, weights, scores});
  CHECK(state.length() == 2 && ids == good);
}

TEST("experts that do not fit the program are refused at construction") {
  TinyModel model({});
  const Program program = model.program(4, 4, 20);
  const auto weights = model.load(program);
  CHECK_THROWS(Error, "no expert memory", Executor(program, *weights, nullptr, 1));
  auto refused = [&](const char* part, TinySpec spec) {
    TinyModel other(spec);
    ExpertMemory memory(other.source(), {.arena_bytes = other.all_records()});
    CHECK_THROWS(Error, part, Executor(program, *weights, &memory, 1));
  };
  refused("layer 2: the checkpoint has 2 layers", {.num_layers = 2});
  refused("found 9 experts, expected 8", {.num_experts = 9});
  refused("gate has shape [128, 64], expected [96, 64]", {.width = 128});
  refused("both be quantized", {.experts = {{kQ4, kF16, kQ4}}});
  refused("both be quantized", {.experts = {{kF16, kF16, kQ4}}});
  Weights empty(program);
  ExpertMemory memory(model.source(), {.arena_bytes = model.all_records()});
  CHECK_THROWS(Error, "weight 0 of the program was not loaded", Executor(program, empty, &memory, 1));
}
