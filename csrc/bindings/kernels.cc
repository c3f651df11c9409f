// Layout, checksums and, under _core.kernels, the kernels one by one for tests. Every size is checked here: the core
// trusts its callers.
#include "kernels/kernels.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bindings/bindings.h"
#include "support/error.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace headrace {
namespace {

template <class T, size_t kDims>
using Array = nb::ndarray<T, nb::ndim<kDims>, nb::c_contig, nb::device::cpu>;
template <class T>
using NumpyArray = nb::ndarray<nb::numpy, T>;

// Throws unless the two sizes are equal.
void expect_size(const char* what, size_t found, size_t expected) {
  if (found != expected) {
    throw Error(std::string(what) + ": expected " + std::to_string(expected) + " elements, found " +
                std::to_string(found));
  }
}

void expect(bool condition, const std::string& message) {
  if (!condition) throw Error(message);
}

DType known_dtype(uint32_t type) {
  expect(is_known_dtype(type),
         "dtype: expected a GGUF type id of F32 (0), F16 (1), Q4_0 (2), Q8_0 (8) or BF16 (30), "
         "found " +
             std::to_string(type));
  return static_cast<DType>(type);
}

// A dtype that can have rows of `cols` values.
DType dtype_of_row(uint32_t type, size_t cols) {
  const DType known = known_dtype(type);
  expect(!is_quantized(known) || cols % kQuantBlock == 0,
         "cols: expected a multiple of 32 for a quantized type, found " + std::to_string(cols));
  return known;
}

const Kernels& table(const std::string& isa) {
  const Kernels* k = kernels_for(isa.c_str());
  expect(k != nullptr, "isa: '" + isa + "' is not an instruction set of this processor");
  return *k;
}

// A new array that owns its memory. Called with the GIL held.
template <class T>
NumpyArray<T> make_array(std::vector<size_t> shape) {
  size_t n = 1;
  for (size_t extent : shape) n *= extent;
  T* data = new T[n]();
  nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<T*>(p); });
  return NumpyArray<T>(data, shape.size(), shape.data(), owner);
}

void init_layout(nb::module_& m) {
  m.def(
      "row_bytes", [](uint32_t type, size_t cols) { return row_bytes(dtype_of_row(type, cols), cols); }, "dtype"_a,
      "cols"_a, "Bytes of one row of `cols` values as files store it.");
  m.def(
      "matrix_bytes",
      [](uint32_t type, uint32_t rows, size_t cols) { return matrix_bytes(dtype_of_row(type, cols), rows, cols); },
      "dtype"_a, "rows"_a, "cols"_a, "Bytes of a matrix in the kernels' tile layout (rows padded to 16).");
  m.def(
      "pack_rows",
      [](uint32_t type, uint32_t rows, uint32_t cols, uint32_t row_begin, Array<const uint8_t, 1> src,
         Array<uint8_t, 1> dst) {
        const DType known = dtype_of_row(type, cols);
        expect_size("dst", dst.size(), matrix_bytes(known, rows, cols));
        const size_t stride = row_bytes(known, cols);
        expect(stride > 0, "cols: expected at least 1, found 0");
        const size_t n = src.size() / stride;
        expect_size("src", src.size(), n * stride);
        expect(row_begin % kTileRows == 0 && row_begin <= rows && n <= rows - row_begin &&
                   (n % kTileRows == 0 || row_begin + n == rows),
               "rows: expected to begin at a multiple of 16 and to end at one or at row " + std::to_string(rows) +
                   ", found " + std::to_string(row_begin) + " to " + std::to_string(row_begin + n));
        nb::gil_scoped_release released;
        pack_rows(known, rows, cols, row_begin, static_cast<uint32_t>(n), src.data(), dst.data());
      },
      "dtype"_a, "rows"_a, "cols"_a, "row_begin"_a, "src"_a.noconvert(), "dst"_a.noconvert(),
      "Rearranges whole file rows from `row_begin` on (src, uint8) into their places in the tile layout of the whole "
      "matrix (dst, uint8 [matrix_bytes]).");
  m.def(
      "unpack_row",
      [](uint32_t type, uint32_t rows, uint32_t cols, uint32_t row, Array<const uint8_t, 1> src) {
        const DType known = dtype_of_row(type, cols);
        expect_size("src", src.size(), matrix_bytes(known, rows, cols));
        expect(row < rows, "row: expected less than " + std::to_string(rows) + ", found " + std::to_string(row));
        auto out = make_array<uint8_t>({row_bytes(known, cols)});
        unpack_row({known, rows, cols, src.data()}, row, out.data());
        return out;
      },
      "dtype"_a, "rows"_a, "cols"_a, "row"_a, "src"_a.noconvert(),
      "One row of a matrix in tile layout (src) as files store it: uint8 [row_bytes].");
  m.def(
      "dequantize_rows",
      [](uint32_t type, uint32_t cols, Array<const uint8_t, 1> src) {
        const DType known = dtype_of_row(type, cols);
        const size_t stride = row_bytes(known, cols);
        expect(stride > 0, "cols: expected at least 1, found 0");
        const size_t n = src.size() / stride;
        expect_size("src", src.size(), n * stride);
        auto out = make_array<float>({n, cols});
        {
          nb::gil_scoped_release released;
          for (size_t r = 0; r < n; ++r) dequantize_row(known, src.data() + r * stride, cols, out.data() + r * cols);
        }
        return out;
      },
      "dtype"_a, "cols"_a, "src"_a.noconvert(),
      "File rows (src, uint8) as float32 [n, cols], exactly as gguf-py does.");
  m.def(
      "crc32c",
      [](Array<const uint8_t, 1> data, uint32_t crc) {
        nb::gil_scoped_release released;
        return crc32c(crc, data.data(), data.size());
      },
      "data"_a.noconvert(), "crc"_a = 0, "CRC-32C of uint8 data, continuing from `crc`.");
  m.def(
      "crc32c", [](nb::bytes data, uint32_t crc) { return crc32c(crc, data.c_str(), data.size()); }, "data"_a,
      "crc"_a = 0);
  m.def(
      "isa", [] { return std::string(kernels().isa); },
      "The instruction set in use: HEADRACE_ISA, else the best this processor has.");
}

// [n, cols] activations as float32 or, for quantized types, rows that `quantize` made.
struct Activations {
  Activations(DType type, uint32_t cols, const nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>& x) {
    const bool quantized = is_quantized(type);
    expect(x.ndim() == 2 && x.dtype() == (quantized ? nb::dtype<uint8_t>() : nb::dtype<float>()),
           quantized ? "x: expected uint8 [n, q8_row_bytes]" : "x: expected float32 [n, cols]");
    expect_size("x row", x.shape(1), quantized ? q8_row_bytes(cols) : cols);
    const size_t stride = x.shape(1) * (quantized ? 1 : sizeof(float));
    for (size_t t = 0; t < x.shape(0); ++t) rows.push_back(static_cast<const uint8_t*>(x.data()) + t * stride);
  }
  std::vector<const void*> rows;
};

DType known_kv_type(uint32_t type) {
  expect(type == 0 || type == 1, "kv_type: expected F32 (0) or F16 (1), found " + std::to_string(type));
  return static_cast<DType>(type);
}

RopeStyle rope_style(const std::string& name) {
  expect(name == "neox" || name == "norm", "style: expected neox or norm, found " + name);
  return name == "neox" ? RopeStyle::kNeox : RopeStyle::kNorm;
}

void init_tables(nb::module_& m) {
  m.doc() = "The kernels of a named instruction set, one call each. For tests.";
  m.def("isas", [] {
    std::vector<std::string> names;
    for (const Kernels* k : available_kernels()) names.push_back(k->isa);
    return names;
  });
  m.def(
      "matmul",
      [](const std::string& isa, uint32_t type, uint32_t rows, uint32_t cols, Array<const uint8_t, 1> w,
         nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu> x, uint32_t tile_begin, std::optional<uint32_t> tile_end) {
        const Kernels& k = table(isa);
        const DType known = dtype_of_row(type, cols);
        expect_size("w", w.size(), matrix_bytes(known, rows, cols));
        const Activations activations(known, cols, x);
        const uint32_t end = tile_end.value_or(num_tiles(rows));
        expect(tile_begin <= end && end <= num_tiles(rows), "tiles: expected a range within the matrix");
        const size_t n = activations.rows.size();
        auto y = make_array<float>({n, rows});
        std::vector<float*> out;
        for (size_t t = 0; t < n; ++t) out.push_back(y.data() + t * rows);
        nb::gil_scoped_release released;
        k.matmul({known, rows, cols, w.data()}, activations.rows.data(), static_cast<uint32_t>(n), out.data(),
                 tile_begin, end);
        return y;
      },
      "isa"_a, "dtype"_a, "rows"_a, "cols"_a, "w"_a.noconvert(), "x"_a.noconvert(), "tile_begin"_a = 0,
      "tile_end"_a = nb::none(),
      "x: float32 [n, cols], or uint8 [n, q8_row_bytes] for quantized types; w: tile layout. Returns float32 "
      "[n, rows], zero outside the tiles.");
  m.def(
      "quantize",
      [](const std::string& isa, Array<const float, 2> x) {
        const Kernels& k = table(isa);
        const uint32_t cols = static_cast<uint32_t>(x.shape(1));
        dtype_of_row(static_cast<uint32_t>(DType::kQ8_0), cols);
        const size_t n = x.shape(0), row = q8_row_bytes(cols);
        auto out = make_array<uint8_t>({n, row});
        for (size_t t = 0; t < n; ++t) {
          k.quantize(x.data() + t * cols, cols, 0, cols / kQuantBlock, out.data() + t * row);
        }
        return out;
      },
      "isa"_a, "x"_a.noconvert(), "float32 [n, cols] to uint8 [n, q8_row_bytes].");
  m.def(
      "rms_norm",
      [](const std::string& isa, Array<const float, 1> x, Array<const float, 1> w, float eps) {
        const Kernels& k = table(isa);
        expect(w.size() > 0 && x.size() % w.size() == 0, "w: expected a size that divides x's");
        auto y = make_array<float>({x.size()});
        k.rms_norm(x.data(), w.data(), y.data(), static_cast<uint32_t>(x.size()), static_cast<uint32_t>(w.size()), eps);
        return y;
      },
      "isa"_a, "x"_a.noconvert(), "w"_a.noconvert(), "eps"_a, "x: [width]; w: [group]. The group is w's size.");
  m.def(
      "add",
      [](const std::string& isa, Array<const float, 1> a, Array<const float, 1> b) {
        const Kernels& k = table(isa);
        expect_size("b", b.size(), a.size());
        auto y = make_array<float>({a.size()});
        k.add(a.data(), b.data(), y.data(), static_cast<uint32_t>(a.size()));
        return y;
      },
      "isa"_a, "a"_a.noconvert(), "b"_a.noconvert());
  m.def(
      "accumulate",
      [](const std::string& isa, float weight, Array<const float, 1> x, Array<float, 1> y) {
        const Kernels& k = table(isa);
        expect_size("y", y.size(), x.size());
        k.accumulate(weight, x.data(), y.data(), static_cast<uint32_t>(x.size()));
      },
      "isa"_a, "weight"_a, "x"_a.noconvert(), "y"_a.noconvert(), "In place on y.");
  m.def(
      "swiglu",
      [](const std::string& isa, Array<const float, 1> gate, Array<const float, 1> up) {
        const Kernels& k = table(isa);
        expect_size("up", up.size(), gate.size());
        auto y = make_array<float>({gate.size()});
        k.swiglu(gate.data(), up.data(), y.data(), static_cast<uint32_t>(gate.size()));
        return y;
      },
      "isa"_a, "gate"_a.noconvert(), "up"_a.noconvert());
  m.def(
      "rope_angles",
      [](const std::string& isa, uint32_t position, Array<const float, 1> inv_freq) {
        const Kernels& k = table(isa);
        auto out = make_array<float>({2 * inv_freq.size()});
        k.rope_angles(position, inv_freq.data(), static_cast<uint32_t>(inv_freq.size()), out.data());
        return out;
      },
      "isa"_a, "position"_a, "inv_freq"_a.noconvert(), "[cos.., sin..], each of inv_freq's size.");
  m.def(
      "rope",
      [](const std::string& isa, Array<float, 2> x, Array<const float, 1> angles, const std::string& style) {
        const Kernels& k = table(isa);
        expect(angles.size() % 2 == 0 && angles.size() <= x.shape(1), "angles: expected an even size within head_dim");
        k.rope(x.data(), angles.data(), static_cast<uint32_t>(x.shape(0)), static_cast<uint32_t>(x.shape(1)),
               static_cast<uint32_t>(angles.size()), rope_style(style));
      },
      "isa"_a, "x"_a.noconvert(), "angles"_a.noconvert(), "style"_a,
      "In place on x [heads, head_dim]; the first angles.size elements of each head turn. style: neox or norm.");
  m.def(
      "store_kv",
      [](const std::string& isa, Array<const float, 1> x, uint32_t kv_type) {
        const Kernels& k = table(isa);
        const DType known = known_kv_type(kv_type);
        auto out = make_array<uint8_t>({row_bytes(known, x.size())});
        k.store_kv(x.data(), out.data(), static_cast<uint32_t>(x.size()), known);
        return out;
      },
      "isa"_a, "x"_a.noconvert(), "kv_type"_a);
  m.def(
      "store_keys",
      [](const std::string& isa, Array<const float, 2> x, uint32_t kv_type) {
        const Kernels& k = table(isa);
        const DType known = known_kv_type(kv_type);
        const uint32_t positions = static_cast<uint32_t>(x.shape(0)), head_dim = static_cast<uint32_t>(x.shape(1));
        auto out = make_array<uint8_t>({matrix_bytes(known, positions, head_dim)});
        for (uint32_t p = 0; p < positions; ++p) k.store_key(x.data() + p * head_dim, head_dim, p, known, out.data());
        return out;
      },
      "isa"_a, "x"_a.noconvert(), "kv_type"_a, "x: float32 [positions, head_dim], to tile layout.");
  m.def(
      "attend",
      [](const std::string& isa, Array<const float, 3> q, Array<const uint8_t, 1> keys, Array<const uint8_t, 2> values,
         uint32_t kv_type, uint32_t position, uint32_t window, float scale) {
        const Kernels& k = table(isa);
        const DType known = known_kv_type(kv_type);
        const size_t n = q.shape(0), num_q = q.shape(1), head_dim = q.shape(2);
        expect(n > 0 && num_q > 0 && head_dim > 0, "q: expected at least one row, head and element");
        expect_size("values row", values.shape(1), row_bytes(known, head_dim));
        expect(position + n <= values.shape(0), "position: expected all rows within the values");
        expect_size("keys", keys.size(), matrix_bytes(known, static_cast<uint32_t>(values.shape(0)), head_dim));
        auto out = make_array<float>({n, num_q, head_dim});
        std::vector<float> scratch(attend_scratch_floats(n, num_q, head_dim));
        std::vector<const float*> q_rows;
        std::vector<float*> out_rows;
        for (size_t row = 0; row < n; ++row) {
          q_rows.push_back(q.data() + row * num_q * head_dim);
          out_rows.push_back(out.data() + row * num_q * head_dim);
        }
        const KeysAndValues kv = {static_cast<uint32_t>(head_dim), known, keys.data(), values.data(), window, scale};
        nb::gil_scoped_release released;
        k.attend(kv, q_rows.data(), static_cast<uint32_t>(num_q), static_cast<uint32_t>(n), position, out_rows.data(),
                 scratch.data());
        return out;
      },
      "isa"_a, "q"_a.noconvert(), "keys"_a.noconvert(), "values"_a.noconvert(), "kv_type"_a, "position"_a, "window"_a,
      "scale"_a,
      "q: float32 [n, num_q, head_dim] at positions position..; keys: as store_keys gives them; values: uint8 "
      "[positions, row_bytes]. Returns [n, num_q, head_dim].");
  m.def(
      "route",
      [](const std::string& isa, Array<const float, 1> logits, uint32_t top_k, bool normalize, float scaling) {
        const Kernels& k = table(isa);
        expect(top_k > 0 && top_k <= logits.size(), "top_k: expected 1 to " + std::to_string(logits.size()));
        auto ids = make_array<int32_t>({top_k});
        auto weights = make_array<float>({top_k});
        k.route(logits.data(), static_cast<uint32_t>(logits.size()), top_k, Scoring::kSoftmax, normalize, scaling,
                ids.data(), weights.data());
        return nb::make_tuple(ids, weights);
      },
      "isa"_a, "logits"_a.noconvert(), "top_k"_a, "normalize"_a, "scaling"_a = 1.0f, "Returns (ids, weights).");
}

}  // namespace

void init_kernels(nb::module_& m) {
  init_layout(m);
  nb::module_ tables = m.def_submodule("kernels");
  init_tables(tables);
}

}  // namespace headrace
