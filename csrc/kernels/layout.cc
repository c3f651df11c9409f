// Between file rows and the tile layout of dtype.h. Loader threads run pack_rows on every expert they bring from a
// GGUF in place, so each loop writes one block of the tile at a time and reads its sixteen rows in step.
#include <cstring>
#include <vector>

#include "kernels/half.h"
#include "kernels/kernels.h"

namespace headrace {
namespace {

// One column is 16 values. Columns in steps that keep the tile's part in the L1 cache while its rows are read.
template <class Value>
void pack_columns(const uint8_t* const (&row)[kTileRows], uint32_t cols, uint8_t* tile) {
  constexpr uint32_t kStep = 64 / sizeof(Value);
  for (uint32_t first = 0; first < cols; first += kStep) {
    const uint32_t n = cols - first < kStep ? cols - first : kStep;
    for (uint32_t r = 0; r < kTileRows; ++r) {
      const uint8_t* src = row[r] + first * sizeof(Value);
      uint8_t* dst = tile + (first * kTileRows + r) * sizeof(Value);
      for (uint32_t k = 0; k < n; ++k) {
        std::memcpy(dst + k * kTileRows * sizeof(Value), src + k * sizeof(Value), sizeof(Value));
      }
    }
  }
}

// Blocks of a 2-byte scale and kWords 4-byte groups of quants: 16 scales, then kWords vectors of 16 groups.
template <uint32_t kWords>
void pack_blocks(const uint8_t* const (&row)[kTileRows], uint32_t cols, uint8_t* tile) {
  constexpr uint32_t kRowBlock = 2 + 4 * kWords, kTileBlock = kRowBlock * kTileRows;
  for (uint32_t b = 0; b < cols / kQuantBlock; ++b) {
    uint8_t* block = tile + size_t{b} * kTileBlock;
    for (uint32_t r = 0; r < kTileRows; ++r) {
      const uint8_t* src = row[r] + size_t{b} * kRowBlock;
      std::memcpy(block + 2 * r, src, 2);
      for (uint32_t v = 0; v < kWords; ++v) std::memcpy(block + 32 + 64 * v + 4 * r, src + 2 + 4 * v, 4);
    }
  }
}

template <uint32_t kWords>
void unpack_blocks(const uint8_t* tile, uint32_t r, uint32_t cols, uint8_t* dst) {
  constexpr uint32_t kRowBlock = 2 + 4 * kWords, kTileBlock = kRowBlock * kTileRows;
  for (uint32_t b = 0; b < cols / kQuantBlock; ++b) {
    const uint8_t* block = tile + size_t{b} * kTileBlock;
    uint8_t* out = dst + size_t{b} * kRowBlock;
    std::memcpy(out, block + 2 * r, 2);
    for (uint32_t v = 0; v < kWords; ++v) std::memcpy(out + 2 + 4 * v, block + 32 + 64 * v + 4 * r, 4);
  }
}

void unpack_columns(size_t value_bytes, const uint8_t* tile, uint32_t r, uint32_t cols, uint8_t* dst) {
  for (size_t k = 0; k < cols; ++k) {
    std::memcpy(dst + k * value_bytes, tile + (k * kTileRows + r) * value_bytes, value_bytes);
  }
}

template <class T>
T read(const uint8_t* p) {
  T value;
  std::memcpy(&value, p, sizeof value);
  return value;
}

}  // namespace

void pack_rows(DType type, uint32_t /*rows*/, uint32_t cols, uint32_t row_begin, uint32_t num_rows, const uint8_t* src,
               uint8_t* dst) {
  const size_t src_stride = row_bytes(type, cols);
  const uint32_t row_end = row_begin + num_rows;
  std::vector<uint8_t> padding(num_rows % kTileRows != 0 ? src_stride : 0);  // a zero row
  for (uint32_t first = row_begin; first < row_end; first += kTileRows) {
    const uint8_t* row[kTileRows];
    const uint32_t n = row_end - first < kTileRows ? row_end - first : kTileRows;
    for (uint32_t r = 0; r < kTileRows; ++r) {
      row[r] = r < n ? src + (first - row_begin + r) * src_stride : padding.data();
    }
    uint8_t* tile = dst + first / kTileRows * tile_bytes(type, cols);
    switch (type) {
      case DType::kF32: pack_columns<uint32_t>(row, cols, tile); break;
      case DType::kF16:
      case DType::kBF16: pack_columns<uint16_t>(row, cols, tile); break;
      case DType::kQ4_0: pack_blocks<4>(row, cols, tile); break;
      case DType::kQ8_0: pack_blocks<8>(row, cols, tile); break;
    }
  }
}

void unpack_row(const Matrix& w, uint32_t row, uint8_t* dst) {
  const uint8_t* tile = w.data + row / kTileRows * tile_bytes(w.type, w.cols);
  const uint32_t r = row % kTileRows;
  switch (w.type) {
    case DType::kF32: return unpack_columns(4, tile, r, w.cols, dst);
    case DType::kF16:
    case DType::kBF16: return unpack_columns(2, tile, r, w.cols, dst);
    case DType::kQ4_0: return unpack_blocks<4>(tile, r, w.cols, dst);
    case DType::kQ8_0: return unpack_blocks<8>(tile, r, w.cols, dst);
  }
}

void dequantize_row(DType type, const uint8_t* src, uint32_t cols, float* out) {
  switch (type) {
    case DType::kF32: std::memcpy(out, src, cols * sizeof(float)); return;
    case DType::kF16:
      for (size_t k = 0; k < cols; ++k) out[k] = float_from_f16(read<uint16_t>(src + 2 * k));
      return;
    case DType::kBF16:
      for (size_t k = 0; k < cols; ++k) out[k] = float_from_bf16(read<uint16_t>(src + 2 * k));
      return;
    case DType::kQ4_0:
      for (uint32_t b = 0; b < cols / kQuantBlock; ++b, src += 18, out += kQuantBlock) {
        const float d = float_from_f16(read<uint16_t>(src));
        for (uint32_t j = 0; j < 16; ++j) {
          out[j] = d * static_cast<float>((src[2 + j] & 15) - 8);
          out[16 + j] = d * static_cast<float>((src[2 + j] >> 4) - 8);
        }
      }
      return;
    case DType::kQ8_0:
      for (uint32_t b = 0; b < cols / kQuantBlock; ++b, src += 34, out += kQuantBlock) {
        const float d = float_from_f16(read<uint16_t>(src));
        for (uint32_t j = 0; j < kQuantBlock; ++j) out[j] = d * static_cast<float>(static_cast<int8_t>(src[2 + j]));
      }
      return;
  }
}

}  // namespace headrace
