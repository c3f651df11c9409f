// Replays a program that headrace/program.py compiled, on a model of its own, and compares logits bit for bit.
// tests/golden/make_replay.py wrote the files. With every instruction set they are the same.
#include <cstdio>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>
#include <vector>

#include "check.h"
#include "executor/executor.h"

using namespace headrace;

namespace {

const std::string kDir = "tests/golden/replay/";

std::vector<uint8_t> read_file(const std::string& name) {
  std::ifstream in(kDir + name, std::ios::binary);
  CHECK(in.good());
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

struct Replay {
  Program program = parse_program(read_file("program.bin"));
  Weights weights{program};
  ExpertSource source;
  std::vector<int32_t> tokens;

  Replay() {
    source.files = {kDir + "model.gguf"};
    std::ifstream in(kDir + "index.txt");
    std::string line;
    while (std::getline(in, line)) {
      std::istringstream fields(line);
      std::string kind;
      fields >> kind;
      read_line(kind, fields);
    }
  }

  void read_line(const std::string& kind, std::istringstream& fields) {
    const std::string& file = source.files[0];
    uint32_t index = 0;
    if (kind == "layer") return read_layer(fields);
    fields >> index;
    if (kind == "table") {
      uint64_t offset = 0, stride = 0;
      fields >> offset >> stride;
      weights.set_table(index, file, offset, stride, false);
    } else if (kind == "load") {
      uint64_t offset = 0, nbytes = 0;
      uint32_t dtype = 0;
      fields >> offset >> nbytes >> dtype;
      weights.load(index, "tensor", file, offset, nbytes, static_cast<DType>(dtype), false, false, 0);
    } else if (kind == "vector") {
      uint32_t n = 0;
      std::vector<float> values;
      fields >> n;
      for (std::string word; fields >> word;) values.push_back(std::strtof(word.c_str(), nullptr));
      CHECK_EQ(values.size(), size_t{n});
      weights.set_vector(index, values.data(), n);
    } else {
      CHECK_EQ(kind, "tokens");
      for (int32_t token = 0; fields >> token;) tokens.push_back(token);
      CHECK_EQ(tokens.size(), size_t{index});
    }
  }

  void read_layer(std::istringstream& fields) {
    LayerExperts layer;
    fields >> layer.num_experts;
    for (ExpertPart& part : layer.parts) {
      uint32_t dtype = 0;
      fields >> dtype >> part.rows >> part.cols;
      part.type = static_cast<DType>(dtype);
    }
    for (uint64_t offset = 0; fields >> offset;) layer.rows.push_back({0, offset});
    source.layers.push_back(layer);
  }

  // Logits of all tokens, in passes of `rows` rows.
  std::vector<float> run(uint32_t rows, uint32_t num_experts, uint32_t threads) {
    uint64_t largest = 0;
    for (const LayerExperts& layer : source.layers) largest = std::max(largest, record_bytes(layer));
    ExpertMemoryOptions options;
    options.arena_bytes = num_experts * largest;
    ExpertMemory experts(source, options);
    Executor executor(program, weights, &experts, threads);
    SessionState state(program, static_cast<uint32_t>(tokens.size()), DType::kF16);
    SessionState* states[] = {&state};
    const uint64_t vocab = program.values[program.logits].width;
    std::vector<float> logits(tokens.size() * vocab);
    for (size_t at = 0; at < tokens.size(); at += rows) {
      const size_t n = std::min<size_t>(rows, tokens.size() - at);
      const std::vector<uint32_t> sequences(n, 0);
      std::vector<uint32_t> out_rows(n);
      for (size_t i = 0; i < n; ++i) out_rows[i] = static_cast<uint32_t>(i);
      Pass pass;
      pass.tokens = {tokens.data() + at, n};
      pass.sequences = sequences;
      pass.states = states;
      pass.out_rows = out_rows;
      pass.logits = logits.data() + at * vocab;
      executor.run(pass);
    }
    return logits;
  }
};

}  // namespace

TEST("the committed program gives the committed logits at every split, arena and thread count") {
  const std::vector<uint8_t> expected = read_file("logits.bin");
  Replay replay;
  for (uint32_t rows : {1u, 3u, 8u}) {
    for (uint32_t num_experts : {1u, 4u, 12u}) {
      for (uint32_t threads : {1u, 2u}) {
        const std::vector<float> logits = replay.run(rows, num_experts, threads);
        CHECK_EQ(logits.size() * sizeof(float), expected.size());
        CHECK(std::memcmp(logits.data(), expected.data(), expected.size()) == 0);
      }
    }
  }
}
