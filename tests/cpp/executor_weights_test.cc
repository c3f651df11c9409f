#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <random>

#include "check.h"
#include "executor/weights.h"
#include "program_builder.h"
#include "support/error.h"
#include "temp_file.h"

using namespace headrace;

namespace {

constexpr DType kTypes[] = {DType::kF32, DType::kF16, DType::kBF16, DType::kQ4_0, DType::kQ8_0};

std::vector<uint8_t> random_bytes(size_t n, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<uint8_t> out(n);
  for (uint8_t& b : out) b = static_cast<uint8_t>(random());
  return out;
}

// A program with just these weights: a table, a matrix of the type, a vector.
Program program_of(DType type, uint32_t rows, uint32_t cols, uint32_t vector_cols) {
  ProgramBuilder b(1, 1);
  const uint32_t table = b.weight(WeightRole::kTable, type, rows, cols);
  b.weight(WeightRole::kMatrix, type, rows, cols);
  b.weight(WeightRole::kVector, DType::kF32, 1, vector_cols);
  return parse_program(b.bytes(b.select_rows(b.embed(table))));
}

constexpr uint32_t kTable = 0, kMatrix = 1, kVector = 2;

std::vector<uint8_t> after(size_t gap, const std::vector<uint8_t>& bytes) {
  std::vector<uint8_t> out(gap + bytes.size(), 0xAA);
  std::copy(bytes.begin(), bytes.end(), out.begin() + gap);
  return out;
}

}  // namespace

TEST("a matrix from rows and from tiles") {
  for (DType type : kTypes) {
    for (uint32_t rows : {1u, 16u, 37u, 2100u}) {  // 2100 rows of 1024 columns take several pieces
      const uint32_t cols = rows == 2100 ? 1024 : 96;
      const Program program = program_of(type, rows, cols, 1);
      const std::vector<uint8_t> file_rows = random_bytes(rows * row_bytes(type, cols), rows);
      std::vector<uint8_t> tiles(matrix_bytes(type, rows, cols));
      pack_rows(type, rows, cols, 0, rows, file_rows.data(), tiles.data());
      const TempFile as_rows(after(13, file_rows)), as_tiles(after(4097, tiles));
      Weights weights(program);
      weights.load(kMatrix, "w", as_rows.path(), 13, file_rows.size(), type, false, true,
                   crc32c(0, file_rows.data(), file_rows.size()));
      const Matrix w = weights.matrix(kMatrix);
      CHECK(w.type == type && w.rows == rows && w.cols == cols);
      CHECK(reinterpret_cast<uintptr_t>(w.data) % 64 == 0);
      CHECK(std::memcmp(w.data, tiles.data(), tiles.size()) == 0);
      Weights packed(program);
      packed.load(kMatrix, "w", as_tiles.path(), 4097, tiles.size(), type, true, true,
                  crc32c(0, tiles.data(), tiles.size()));
      CHECK(std::memcmp(packed.matrix(kMatrix).data, tiles.data(), tiles.size()) == 0);
    }
  }
}

TEST("a vector from any float type, of any length") {
  for (DType type : {DType::kF32, DType::kF16, DType::kBF16}) {
    for (uint32_t cols : {1u, 50u, 300000u}) {
      const Program program = program_of(DType::kF32, 1, 1, cols);
      const std::vector<uint8_t> bytes = random_bytes(row_bytes(type, cols), cols);
      const TempFile file(after(5, bytes));
      Weights weights(program);
      weights.load(kVector, "norm", file.path(), 5, bytes.size(), type, false, false, 0);
      std::vector<float> expected(cols);
      dequantize_row(type, bytes.data(), cols, expected.data());
      CHECK(std::memcmp(weights.vector(kVector), expected.data(), cols * sizeof(float)) == 0);
    }
  }
}

TEST("table rows, with and without checksums") {
  for (DType type : kTypes) {
    const uint32_t rows = 7, cols = 64;
    const size_t one = row_bytes(type, cols);
    const std::vector<uint8_t> data = random_bytes(rows * one, 3);
    for (bool has_crc : {false, true}) {
      const size_t stride = one + (has_crc ? 4 : 0) + 6;
      std::vector<uint8_t> bytes(11 + rows * stride - 6);  // nothing after the last row
      for (uint32_t r = 0; r < rows; ++r) {
        std::memcpy(&bytes[11 + r * stride], &data[r * one], one);
        const uint32_t crc = crc32c(0, &data[r * one], one);
        if (has_crc) std::memcpy(&bytes[11 + r * stride + one], &crc, 4);
      }
      const TempFile file(bytes);
      Weights weights(program_of(type, rows, cols, 1));
      weights.set_table(kTable, file.path(), 11, stride, has_crc);
      for (uint32_t r : {6u, 0u, 3u}) {
        std::vector<float> found(cols), expected(cols);
        weights.table_row(kTable, r, found.data());
        dequantize_row(type, &data[r * one], cols, expected.data());
        CHECK(std::memcmp(found.data(), expected.data(), cols * sizeof(float)) == 0);
      }
      CHECK_THROWS(Error, "the file ends at", weights.set_table(kTable, file.path(), 12, stride, has_crc));
      CHECK_THROWS(Error, "apart", weights.set_table(kTable, file.path(), 11, one - 1, has_crc));
      if (has_crc) {
        bytes[11 + 2 * stride + 5] ^= 1;
        const TempFile damaged(bytes);
        weights.set_table(kTable, damaged.path(), 11, stride, true);
        std::vector<float> row(cols);
        CHECK_THROWS(Error, "row 2 of the embedding table", weights.table_row(kTable, 2, row.data()));
        weights.table_row(kTable, 1, row.data());
      }
    }
  }
}

TEST("what is wrong with a file is said in one line") {
  const Program program = program_of(DType::kQ8_0, 20, 64, 50);
  const size_t nbytes = 20 * row_bytes(DType::kQ8_0, 64);
  const TempFile file(random_bytes(nbytes + 100, 1));
  Weights weights(program);
  const auto load = [&](uint32_t index, const std::string& path, uint64_t offset, uint64_t n, DType type, bool packed) {
    weights.load(index, "blk.0.w", path, offset, n, type, packed, true, 12345);
  };
  CHECK_THROWS(Error, "/nowhere: cannot open", load(kMatrix, "/nowhere", 0, nbytes, DType::kQ8_0, false));
  CHECK_THROWS(Error, "/tmp: not a regular file", load(kMatrix, "/tmp", 0, nbytes, DType::kQ8_0, false));
  CHECK_THROWS(Error, "tensor blk.0.w at offset 101: expected",
               load(kMatrix, file.path(), 101, nbytes, DType::kQ8_0, false));
  CHECK_THROWS(Error, "the file ends at", load(kMatrix, file.path(), UINT64_MAX, nbytes, DType::kQ8_0, false));
  CHECK_THROWS(Error, "bytes, expected 1360", load(kMatrix, file.path(), 0, nbytes - 34, DType::kQ8_0, false));
  CHECK_THROWS(Error, "bytes, expected 2176", load(kMatrix, file.path(), 0, nbytes, DType::kQ8_0, true));
  CHECK_THROWS(Error, "type 0 does not fit", load(kMatrix, file.path(), 0, nbytes, DType::kF32, false));
  CHECK_THROWS(Error, "CRC-32C", load(kMatrix, file.path(), 0, nbytes, DType::kQ8_0, false));
  CHECK_THROWS(Error, "type 8 does not fit", load(kVector, file.path(), 0, 68, DType::kQ8_0, false));
  CHECK_THROWS(Error, "role 0, expected 2", load(kTable, file.path(), 0, nbytes, DType::kQ8_0, false));
  CHECK_THROWS(Error, "index 3", load(3, file.path(), 0, nbytes, DType::kQ8_0, false));
  const float values[3] = {1, 2, 3};
  CHECK_THROWS(Error, "given 3 values, expected 50", weights.set_vector(kVector, values, 3));
  CHECK_THROWS(Error, "weight 0 of the program was not loaded", weights.check_complete());
}

TEST("resident bytes are what the mapping commits") {
  const Program program = program_of(DType::kF32, 100, 100, 100);
  const uint64_t expected = (matrix_bytes(DType::kF32, 100, 100) + 400 + 63) / 64 * 64;
  CHECK_EQ(Weights::resident_bytes(program), (expected + 4095) / 4096 * 4096);
}
