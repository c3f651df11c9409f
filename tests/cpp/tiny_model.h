// A random MoE model in a temporary file, and the plainest way to compute it: token by token, one thread, whole
// matrices, per-route outputs, no chunks and no arena. The executor must give the same bits.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "executor/executor.h"
#include "experts/expert_memory.h"
#include "kernels/kernels.h"
#include "program_builder.h"
#include "temp_file.h"

namespace headrace {

struct TinySpec {
  uint32_t num_layers = 3, hidden = 64, num_q = 4, num_kv = 2, head_dim = 16, rotary = 16;
  uint32_t num_experts = 8, top_k = 3, width = 96, vocab = 77, window = 0;
  bool normalize = true, norm_heads = false;
  RopeStyle style = RopeStyle::kNeox;
  DType dense = DType::kQ4_0, head = DType::kQ8_0, table = DType::kF16;
  std::vector<std::array<DType, 3>> experts = {{DType::kQ4_0, DType::kQ4_0, DType::kQ4_0}};  // by layer, repeating
};

class TinyModel {
 public:
  // A tensor as files store it, and in tile layout.
  struct Tensor {
    std::string name;
    uint32_t weight = 0;  // index in the program
    WeightRole role = WeightRole::kMatrix;
    DType dtype = DType::kF32;
    uint32_t rows = 1, cols = 1;
    uint64_t offset = 0;
    std::vector<uint8_t> data, tiles;
    Matrix matrix() const { return {dtype, rows, cols, aligned(tiles)}; }
    const float* floats() const { return reinterpret_cast<const float*>(data.data()); }
  };
  struct Layer {
    Tensor attn_norm, q, k, v, q_norm, k_norm, o, ffn_norm, router;
    std::vector<std::array<Tensor, 3>> experts;
  };

  explicit TinyModel(TinySpec s, uint64_t seed = 1) : spec(std::move(s)), random_(seed) {
    table = tensor("table", WeightRole::kTable, spec.table, spec.vocab, spec.hidden);
    inv_freq = tensor("inv_freq", WeightRole::kVector, DType::kF32, 1, spec.rotary / 2);
    for (uint32_t l = 0; l < spec.num_layers; ++l) {
      const uint32_t q_width = spec.num_q * spec.head_dim, kv_width = spec.num_kv * spec.head_dim;
      Layer layer;
      layer.attn_norm = vector("attn_norm", spec.hidden);
      layer.q = dense("q", q_width, spec.hidden);
      layer.k = dense("k", kv_width, spec.hidden);
      layer.v = dense("v", kv_width, spec.hidden);
      layer.q_norm = vector("q_norm", spec.norm_heads ? spec.head_dim : q_width);
      layer.k_norm = vector("k_norm", spec.norm_heads ? spec.head_dim : kv_width);
      layer.o = dense("o", spec.hidden, q_width);
      layer.ffn_norm = vector("ffn_norm", spec.hidden);
      layer.router = tensor("router", WeightRole::kMatrix, DType::kF32, spec.num_experts, spec.hidden);
      const std::array<DType, 3> types = spec.experts[l % spec.experts.size()];
      for (uint32_t e = 0; e < spec.num_experts; ++e) {
        std::array<Tensor, 3>& parts = layer.experts.emplace_back();
        for (int i = 0; i < 3; ++i)
          parts[i] = tensor("expert", WeightRole::kMatrix, types[i], i < 2 ? spec.width : spec.hidden,
                            i < 2 ? spec.hidden : spec.width);
      }
      layers.push_back(std::move(layer));
    }
    norm = vector("norm", spec.hidden);
    head = tensor("head", WeightRole::kMatrix, spec.head, spec.vocab, spec.hidden);
    write_file();
  }

  Program program(uint32_t max_rows, uint32_t max_out_rows, uint32_t route_capacity) {
    return parse_program(program_bytes(max_rows, max_out_rows, route_capacity));
  }

  std::vector<uint8_t> program_bytes(uint32_t max_rows, uint32_t max_out_rows, uint32_t route_capacity) {
    ProgramBuilder b(max_rows, max_out_rows);
    auto declare = [&](Tensor& t) { return t.weight = b.weight(t.role, t.dtype, t.rows, t.cols); };
    uint32_t x = b.embed(declare(table));
    const uint32_t angles = b.rope_angles(declare(inv_freq));
    for (uint32_t l = 0; l < spec.num_layers; ++l) {
      Layer& layer = layers[l];
      const uint32_t h = b.as_input(b.rms_norm(x, declare(layer.attn_norm), kEps), spec.dense);
      uint32_t q = b.rms_norm(b.linear(h, declare(layer.q)), declare(layer.q_norm), kEps);
      uint32_t k = b.rms_norm(b.linear(h, declare(layer.k)), declare(layer.k_norm), kEps);
      const uint32_t v = b.linear(h, declare(layer.v));
      q = b.rope(q, angles, spec.head_dim, static_cast<int64_t>(spec.style));
      k = b.rope(k, angles, spec.head_dim, static_cast<int64_t>(spec.style));
      const uint32_t state = b.state(spec.num_kv, spec.head_dim);
      const uint32_t a = b.attention(q, k, v, state, spec.num_q, spec.window, scale());
      x = b.add(x, b.linear(a, declare(layer.o)));
      const uint32_t f = b.rms_norm(x, declare(layer.ffn_norm), kEps);
      const uint32_t ids = b.value(ValueKind::kI32, spec.top_k), weights = b.value(ValueKind::kF32, spec.top_k);
      b.op(OpCode::kRoute, {b.linear(f, declare(layer.router))}, {}, {}, {ids, weights},
           {int64_t{l}, int64_t{spec.top_k}, int64_t{0}, int64_t{spec.normalize}, 1.0});
      const uint32_t in = b.as_input(f, layer.experts[0][0].dtype);
      x = b.add(x, b.experts(in, ids, weights, spec.hidden, l, spec.num_experts, spec.width, route_capacity));
    }
    const uint32_t selected = b.select_rows(b.rms_norm(x, declare(norm), kEps));
    return b.bytes(b.output(selected, declare(head)));
  }

  // After program(), which numbers the weights.
  std::unique_ptr<Weights> load(const Program& program) const {
    auto weights = std::make_unique<Weights>(program);
    auto load_one = [&](const Tensor& t) {
      weights->load(t.weight, t.name, file_->path(), t.offset, t.data.size(), t.dtype, false, true,
                    crc32c(0, t.data.data(), t.data.size()));
    };
    weights->set_table(table.weight, file_->path(), table.offset, row_bytes(table.dtype, table.cols), false);
    weights->set_vector(inv_freq.weight, inv_freq.floats(), inv_freq.cols);
    for (const Layer& l : layers)
      for (const Tensor* t : {&l.attn_norm, &l.q, &l.k, &l.v, &l.q_norm, &l.k_norm, &l.o, &l.ffn_norm, &l.router})
        load_one(*t);
    load_one(norm);
    load_one(head);
    return weights;
  }

  ExpertSource source() const {
    ExpertSource s;
    s.files = {file_->path()};
    for (const Layer& layer : layers) {
      LayerExperts& out = s.layers.emplace_back();
      out.num_experts = spec.num_experts;
      for (int i = 0; i < 3; ++i)
        out.parts[i] = {layer.experts[0][i].dtype, layer.experts[0][i].rows, layer.experts[0][i].cols};
      for (const auto& expert : layer.experts)
        for (const Tensor& part : expert) out.rows.push_back({0, part.offset});
    }
    return s;
  }

  uint64_t largest_record() const {
    uint64_t most = 0;
    for (const LayerExperts& l : source().layers) most = std::max(most, record_bytes(l));
    return most;
  }
  uint64_t all_records() const {
    uint64_t total = 0;
    for (const LayerExperts& l : source().layers) total += l.num_experts * record_bytes(l);
    return total;
  }

  // Logits of every token of one sequence: [tokens, vocab].
  std::vector<float> reference(const std::vector<int32_t>& tokens, DType kv_type) const {
    std::vector<std::vector<uint8_t>> keys(spec.num_layers * spec.num_kv), values(keys.size());
    std::vector<float> logits;
    for (uint32_t position = 0; position < tokens.size(); ++position) {
      std::vector<float> x(spec.hidden);
      dequantize_row(table.dtype, table.data.data() + tokens[position] * row_bytes(table.dtype, spec.hidden),
                     spec.hidden, x.data());
      for (uint32_t l = 0; l < spec.num_layers; ++l) {
        attention(layers[l], position, kv_type, &keys[l * spec.num_kv], &values[l * spec.num_kv], x);
        mixture(layers[l], x);
      }
      const std::vector<float> y = product(head, rms_norm(x, norm));
      logits.insert(logits.end(), y.begin(), y.end());
    }
    return logits;
  }

  TinySpec spec;
  Tensor table, inv_freq, norm, head;
  std::vector<Layer> layers;

 private:
  static constexpr double kEps = 1e-5;
  double scale() const { return 1 / std::sqrt(static_cast<double>(spec.head_dim)); }

  static const uint8_t* aligned(const std::vector<uint8_t>& tiles) {  // tiles has 63 bytes to spare
    return reinterpret_cast<const uint8_t*>((reinterpret_cast<uintptr_t>(tiles.data()) + 63) / 64 * 64);
  }

  // ---- the plain computation

  void attention(const Layer& layer, uint32_t position, DType kv_type, std::vector<uint8_t>* keys,
                 std::vector<uint8_t>* values, std::vector<float>& x) const {
    const Kernels& kern = kernels();
    const std::vector<float> h = rms_norm(x, layer.attn_norm);
    std::vector<float> q = rms_norm(product(layer.q, h), layer.q_norm);
    std::vector<float> k = rms_norm(product(layer.k, h), layer.k_norm);
    const std::vector<float> v = product(layer.v, h);
    std::vector<float> angles(spec.rotary);
    kern.rope_angles(position, inv_freq.floats(), spec.rotary / 2, angles.data());
    kern.rope(q.data(), angles.data(), spec.num_q, spec.head_dim, spec.rotary, spec.style);
    kern.rope(k.data(), angles.data(), spec.num_kv, spec.head_dim, spec.rotary, spec.style);
    const uint32_t per_kv = spec.num_q / spec.num_kv;
    const size_t stored = row_bytes(kv_type, spec.head_dim);
    std::vector<float> out(q.size()), scratch(attend_scratch_floats(1, per_kv, spec.head_dim));
    for (uint32_t g = 0; g < spec.num_kv; ++g) {
      keys[g].resize(matrix_bytes(kv_type, position + 1, spec.head_dim));
      values[g].resize((position + 1) * stored);
      kern.store_key(&k[g * spec.head_dim], spec.head_dim, position, kv_type, keys[g].data());
      kern.store_kv(&v[g * spec.head_dim], &values[g][position * stored], spec.head_dim, kv_type);
      const KeysAndValues kv = {spec.head_dim,    kv_type,     keys[g].data(),
                                values[g].data(), spec.window, static_cast<float>(scale())};
      const size_t at = g * per_kv * spec.head_dim;
      const float* q_g = &q[at];
      float* out_g = &out[at];
      kern.attend(kv, &q_g, per_kv, 1, position, &out_g, scratch.data());
    }
    const std::vector<float> y = product(layer.o, out);
    for (size_t i = 0; i < x.size(); ++i) x[i] += y[i];
  }

  void mixture(const Layer& layer, std::vector<float>& x) const {
    const Kernels& kern = kernels();
    const std::vector<float> f = rms_norm(x, layer.ffn_norm), scores = product(layer.router, f);
    std::vector<int32_t> ids(spec.top_k);
    std::vector<float> weights(spec.top_k), y(spec.hidden, 0.0f);
    kern.route(scores.data(), spec.num_experts, spec.top_k, Scoring::kSoftmax, spec.normalize, 1.0f, ids.data(),
               weights.data());
    for (uint32_t j = 0; j < spec.top_k; ++j) {
      const auto& [gate, up, down] = layer.experts[ids[j]];
      std::vector<float> h = product(gate, f);
      const std::vector<float> u = product(up, f);
      kern.swiglu(h.data(), u.data(), h.data(), spec.width);
      const std::vector<float> out = product(down, h);
      for (uint32_t i = 0; i < spec.hidden; ++i) y[i] = std::fma(weights[j], out[i], y[i]);
    }
    for (size_t i = 0; i < x.size(); ++i) x[i] += y[i];
  }

  static std::vector<float> rms_norm(const std::vector<float>& x, const Tensor& weight) {
    std::vector<float> y(x.size());
    kernels().rms_norm(x.data(), weight.floats(), y.data(), static_cast<uint32_t>(x.size()), weight.cols,
                       static_cast<float>(kEps));
    return y;
  }

  static std::vector<float> product(const Tensor& t, const std::vector<float>& x) {
    std::vector<float> y(t.rows);
    std::vector<uint8_t> q8(q8_row_bytes(t.cols));
    if (is_quantized(t.dtype)) kernels().quantize(x.data(), t.cols, 0, t.cols / kQuantBlock, q8.data());
    const void* in = is_quantized(t.dtype) ? static_cast<const void*>(q8.data()) : x.data();
    float* out = y.data();
    kernels().matmul(t.matrix(), &in, 1, &out, 0, num_tiles(t.rows));
    return y;
  }

  // ---- random tensors

  Tensor dense(const char* name, uint32_t rows, uint32_t cols) {
    return tensor(name, WeightRole::kMatrix, spec.dense, rows, cols);
  }
  Tensor vector(const char* name, uint32_t cols) { return tensor(name, WeightRole::kVector, DType::kF32, 1, cols); }

  Tensor tensor(const char* name, WeightRole role, DType dtype, uint32_t rows, uint32_t cols) {
    Tensor t{name, 0, role, dtype, rows, cols, 0, std::vector<uint8_t>(rows * row_bytes(dtype, cols)), {}};
    const float spread = role == WeightRole::kMatrix ? 1.5f / std::sqrt(static_cast<float>(cols)) : 1.0f;
    switch (dtype) {
      case DType::kF32:
        for (size_t i = 0; i < t.data.size(); i += 4) put(t, i, spread * normal_(random_));
        break;
      case DType::kBF16:
        for (size_t i = 0; i < t.data.size(); i += 2)
          put(t, i, static_cast<uint16_t>(__builtin_bit_cast(uint32_t, spread* normal_(random_)) >> 16));
        break;
      case DType::kF16:
        for (size_t i = 0; i < t.data.size(); i += 2) put(t, i, half());
        break;
      default:  // blocks: an f16 scale, then quants
        for (size_t i = 0; i < t.data.size(); ++i) t.data[i] = static_cast<uint8_t>(random_());
        const size_t block = row_bytes(dtype, kQuantBlock);
        const uint16_t exponent = dtype == DType::kQ4_0 ? 9 : 5;
        for (size_t i = 0; i < t.data.size(); i += block)
          put(t, i, static_cast<uint16_t>(exponent << 10 | (random_() & 1023)));
    }
    if (role == WeightRole::kMatrix) {
      t.tiles.resize(matrix_bytes(dtype, rows, cols) + 63);
      pack_rows(dtype, rows, cols, 0, rows, t.data.data(), const_cast<uint8_t*>(aligned(t.tiles)));
    }
    return t;
  }
  uint16_t half() {  // magnitudes from 1/32 to 1/4
    return static_cast<uint16_t>((random_() & 0x8000) | (10 + random_() % 3) << 10 | (random_() & 1023));
  }
  template <class T>
  static void put(Tensor& t, size_t at, T v) {
    std::memcpy(&t.data[at], &v, sizeof v);
  }

  void write_file() {
    std::vector<uint8_t> file(100);
    auto place = [&](Tensor& t) {
      file.resize(file.size() + 1 + file.size() % 3);  // any alignment
      t.offset = file.size();
      file.insert(file.end(), t.data.begin(), t.data.end());
    };
    for (Tensor* t : {&table, &norm, &head}) place(*t);
    for (Layer& l : layers) {
      for (Tensor* t : {&l.attn_norm, &l.q, &l.k, &l.v, &l.q_norm, &l.k_norm, &l.o, &l.ffn_norm, &l.router}) place(*t);
      for (auto& expert : l.experts)
        for (Tensor& part : expert) place(part);
    }
    file_ = std::make_unique<TempFile>(file);
  }

  std::mt19937 random_;
  std::normal_distribution<float> normal_;
  std::unique_ptr<TempFile> file_;
};

}  // namespace headrace
