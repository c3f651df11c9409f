// Small fixed cases of every kernel, for counting instructions: kernel_counts.py runs this under callgrind.
//   kernel_counts ISA
// Prints the compiler, then the cases' names in the order in which counted() runs them.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "kernels/kernels.h"

using namespace headrace;

// What callgrind counts, and dumps at each return.
extern "C" __attribute__((noinline)) void counted(const std::function<void()>& work) {
  work();
  asm volatile("" ::: "memory");  // work's return is not ours
}

namespace {

constexpr struct {
  DType type;
  const char* name;
} kTypes[] = {
    {DType::kQ4_0, "Q4_0"}, {DType::kQ8_0, "Q8_0"}, {DType::kF16, "F16"}, {DType::kBF16, "BF16"}, {DType::kF32, "F32"}};

void count(const std::string& name, const std::function<void()>& work) {
  work();  // the first call of a library function looks it up
  counted(work);
  std::puts(name.c_str());
}

// Ordinary values; which ones does not change what runs.
struct Weights {
  Weights(DType type, uint32_t rows, uint32_t cols)
      : bytes(static_cast<uint8_t*>(std::aligned_alloc(64, (matrix_bytes(type, rows, cols) + 63) / 64 * 64))),
        matrix{type, rows, cols, bytes} {
    std::memset(bytes, 0x3c, matrix_bytes(type, rows, cols));
  }
  ~Weights() { std::free(bytes); }
  Weights(const Weights&) = delete;
  Weights& operator=(const Weights&) = delete;
  uint8_t* bytes;
  Matrix matrix;
};

// n rows of `width` floats and, for products with quantized weights, the same in int8.
struct Rows {
  Rows(const Kernels& k, uint32_t n, uint32_t width) : kernels(k), width(width), values(size_t{n} * width) {
    for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i % 17) - 8.0f;
    if (width % kQuantBlock == 0) q8.resize(n * q8_row_bytes(width));
    for (uint32_t t = 0; t < n; ++t) {
      floats.push_back(values.data() + size_t{t} * width);
      float_rows.push_back(floats.back());
      if (!q8.empty()) q8_rows.push_back(q8.data() + t * q8_row_bytes(width));
    }
    quantize();
  }
  void quantize() {
    for (size_t t = 0; t < q8_rows.size(); ++t) {
      kernels.quantize(floats[t], width, 0, width / kQuantBlock, q8.data() + t * q8_row_bytes(width));
    }
  }
  const void* const* as(DType weights) const { return is_quantized(weights) ? q8_rows.data() : float_rows.data(); }

  const Kernels& kernels;
  uint32_t width;
  std::vector<float> values;
  std::vector<uint8_t> q8;
  std::vector<float*> floats;
  std::vector<const void*> float_rows, q8_rows;
};

void count_products(const Kernels& k, DType type, const std::string& name) {
  constexpr uint32_t kOut = 80, kCols = 1024;
  const Weights w(type, kOut, kCols);
  for (uint32_t n : {1u, 4u, 16u}) {
    const Rows x(k, n, kCols);
    Rows y(k, n, kOut);
    count("matmul " + name + " n=" + std::to_string(n),
          [&] { k.matmul(w.matrix, x.as(type), n, y.floats.data(), 0, num_tiles(kOut)); });
  }
}

// One expert over n rows: gate, up, activation, down, into the sum.
void count_expert(const Kernels& k, DType type, const std::string& name) {
  constexpr uint32_t kHidden = 256, kInner = 96;
  const Weights w_gate(type, kInner, kHidden), w_up(type, kInner, kHidden), w_down(type, kHidden, kInner);
  for (uint32_t n : {1u, 4u, 16u}) {
    const Rows x(k, n, kHidden);
    Rows gate(k, n, kInner), up(k, n, kInner), down(k, n, kHidden), sum(k, n, kHidden);
    count("expert " + name + " n=" + std::to_string(n), [&] {
      k.matmul(w_gate.matrix, x.as(type), n, gate.floats.data(), 0, num_tiles(kInner));
      k.matmul(w_up.matrix, x.as(type), n, up.floats.data(), 0, num_tiles(kInner));
      for (uint32_t t = 0; t < n; ++t) k.swiglu(gate.floats[t], up.floats[t], gate.floats[t], kInner);
      if (is_quantized(type)) gate.quantize();
      k.matmul(w_down.matrix, gate.as(type), n, down.floats.data(), 0, num_tiles(kHidden));
      for (uint32_t t = 0; t < n; ++t) k.accumulate(0.25f, down.floats[t], sum.floats[t], kHidden);
    });
  }
}

void count_attention(const Kernels& k, DType kv_type, const std::string& name) {
  constexpr uint32_t kHeadDim = 128, kPositions = 75;
  const std::vector<float> values(size_t{kPositions} * kHeadDim, 0.5f);
  std::vector<uint8_t> stored(row_bytes(kv_type, values.size()));
  std::vector<uint8_t> keys(matrix_bytes(kv_type, kPositions, kHeadDim));
  count("store_kv " + name,
        [&] { k.store_kv(values.data(), stored.data(), static_cast<uint32_t>(values.size()), kv_type); });
  count("store_key " + name, [&] {
    for (uint32_t p = 0; p < kPositions; ++p)
      k.store_key(values.data() + size_t{p} * kHeadDim, kHeadDim, p, kv_type, keys.data());
  });
  const KeysAndValues kv = {kHeadDim, kv_type, keys.data(), stored.data(), 0, 0.1f};
  for (uint32_t num_q : {1u, 8u}) {
    for (uint32_t n : {1u, 5u}) {
      const std::vector<float> q_values(size_t{n} * num_q * kHeadDim, 0.25f);
      std::vector<float> out_values(q_values.size()), scratch(attend_scratch_floats(n, num_q, kHeadDim));
      std::vector<const float*> q(n);
      std::vector<float*> out(n);
      for (uint32_t i = 0; i < n; ++i) {
        q[i] = q_values.data() + size_t{i} * num_q * kHeadDim;
        out[i] = out_values.data() + size_t{i} * num_q * kHeadDim;
      }
      count("attend " + name + " heads=" + std::to_string(num_q) + " n=" + std::to_string(n),
            [&] { k.attend(kv, q.data(), num_q, n, kPositions - n, out.data(), scratch.data()); });
    }
  }
}

void count_the_rest(const Kernels& k) {
  constexpr uint32_t kWidth = 1000, kHeadDim = 128, kHeads = 4, kExperts = 64, kTopK = 8;
  std::vector<float> a(kWidth, 0.5f), b(kWidth, 0.25f), y(kWidth), angles(kHeadDim);
  std::vector<uint8_t> q8(q8_row_bytes(960));
  count("quantize", [&] { k.quantize(a.data(), 960, 0, 960 / kQuantBlock, q8.data()); });
  count("rms_norm", [&] { k.rms_norm(a.data(), b.data(), y.data(), kWidth, kWidth, 1e-5f); });
  count("add", [&] { k.add(a.data(), b.data(), y.data(), kWidth); });
  count("accumulate", [&] { k.accumulate(0.5f, b.data(), y.data(), kWidth); });
  count("swiglu", [&] { k.swiglu(a.data(), b.data(), y.data(), kWidth); });
  count("rope_angles", [&] { k.rope_angles(7, b.data(), kHeadDim / 2, angles.data()); });
  count("rope neox", [&] { k.rope(a.data(), angles.data(), kHeads, kHeadDim, kHeadDim, RopeStyle::kNeox); });
  count("rope norm", [&] { k.rope(a.data(), angles.data(), kHeads, kHeadDim, kHeadDim, RopeStyle::kNorm); });

  std::vector<float> logits(kExperts), weights(kTopK);
  std::vector<int32_t> ids(kTopK);
  for (uint32_t e = 0; e < kExperts; ++e) logits[e] = static_cast<float>(e * 37 % kExperts);
  count("route",
        [&] { k.route(logits.data(), kExperts, kTopK, Scoring::kSoftmax, true, 1.0f, ids.data(), weights.data()); });

  // A row's log-probability in 50,304 columns.
  constexpr uint32_t kPiece = 256, kPieces = 197;
  std::vector<float> piece(kPiece, 1.0f), maxima(kPieces, 3.0f), sums(kPieces, 100.0f);
  for (uint32_t i = 0; i < kPiece; ++i) piece[i] = static_cast<float>(i % 23) - 11.0f;
  float max_logit = 0, sum = 0;
  count("sum_exp", [&] { k.sum_exp(piece.data(), kPiece, &max_logit, &sum); });
  count("log_prob", [&] { sum = k.log_prob(1.0f, maxima.data(), sums.data(), kPieces); });
}

}  // namespace

int main(int argc, char** argv) {
  const Kernels* k = argc == 2 ? kernels_for(argv[1]) : nullptr;
  if (k == nullptr) {
    std::fprintf(stderr, "usage: kernel_counts ISA; ISA is one of");
    for (const Kernels* known : available_kernels()) std::fprintf(stderr, " %s", known->isa);
    std::fprintf(stderr, "\n");
    return 2;
  }
#if defined(__clang__)
  std::printf("clang-%d\n", __clang_major__);
#else
  std::printf("gcc-%d\n", __GNUC__);
#endif
  for (const auto& t : kTypes) count_products(*k, t.type, t.name);
  for (const auto& t : kTypes) count_expert(*k, t.type, t.name);
  count_attention(*k, DType::kF16, "F16");
  count_attention(*k, DType::kF32, "F32");
  count_the_rest(*k);
}
