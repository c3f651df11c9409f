// Weight types and the tile layout "tile16" in which kernels read them. docs/format.md is the byte-exact text.
#pragma once

#include <cstddef>
#include <cstdint>

namespace headrace {

// Values are GGUF's type ids, so that a number means the same in files, programs and kernels.
enum class DType : uint32_t { kF32 = 0, kF16 = 1, kQ4_0 = 2, kQ8_0 = 8, kBF16 = 30 };

// Tile layout. A matrix [rows, cols] is cut into tiles of 16 rows; tiles follow each other in row order and
// the last is padded with zero rows. Within a tile, blocks of columns follow each other:
//   F32, F16, BF16  one column is 16 values, row 0 first.
//   Q4_0            32 columns are 16 f16 scales, then four 64-byte vectors; 4-byte lane r of vector v holds
//                   bytes 4v..4v+3 of row r's 16 quant bytes (so low nibbles are columns 4v.., high 16+4v..).
//   Q8_0            32 columns are 16 f16 scales, then eight 64-byte vectors; lane r of vector v holds the
//                   signed values of row r, columns 4v..4v+3.
constexpr uint32_t kTileRows = 16;
constexpr uint32_t kQuantBlock = 32;

constexpr bool is_quantized(DType t) { return t == DType::kQ4_0 || t == DType::kQ8_0; }

constexpr bool is_known_dtype(uint32_t v) { return v == 0 || v == 1 || v == 2 || v == 8 || v == 30; }

// Bytes of one row of `cols` values as files store it. For quantized types cols % 32 == 0 is required.
constexpr size_t row_bytes(DType t, size_t cols) {
  switch (t) {
    case DType::kF32: return cols * 4;
    case DType::kF16: return cols * 2;
    case DType::kBF16: return cols * 2;
    case DType::kQ4_0: return cols / kQuantBlock * 18;
    case DType::kQ8_0: return cols / kQuantBlock * 34;
  }
  return 0;
}

constexpr uint32_t num_tiles(uint32_t rows) { return (rows + kTileRows - 1) / kTileRows; }
constexpr size_t tile_bytes(DType t, size_t cols) { return row_bytes(t, cols) * kTileRows; }
constexpr size_t matrix_bytes(DType t, uint32_t rows, size_t cols) {
  return static_cast<size_t>(num_tiles(rows)) * tile_bytes(t, cols);
}

// An activation row quantized to int8: `cols` int8 values, then cols/32 f32 scales d, then cols/32 int32 sums of
// the block's int8 values. value = d * q, d = max|x| / 127, q = round-half-even(x * (127 / max|x|)). Where 127 / max|x|
// overflows (max|x| < 3.8e-37) d and q are 0; where x holds a NaN or an infinity d is that, so that it stays visible.
constexpr size_t q8_row_bytes(size_t cols) { return cols + cols / kQuantBlock * 8; }

}  // namespace headrace
