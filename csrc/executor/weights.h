// The trunk: every tensor but the routed experts, resident, and the embedding table, read row by row.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "executor/program.h"
#include "kernels/kernels.h"

namespace headrace {

class Weights {
 public:
  // Reserves one mapping for all matrices and vectors of the program. Memory is committed as tensors are loaded.
  explicit Weights(const Program& program);
  ~Weights();

  // Bytes that loading everything will commit.
  static uint64_t resident_bytes(const Program& program);

  // Reads rows [0, rows) x cols of `index` from a file: `packed` false: file rows of `file_dtype` (equal to the
  // weight's dtype for matrices; any float type for vectors), rearranged into tile layout; true: tile16 as is.
  // Bounded staging (about 1 MiB). The page cache is left as it was (pages read are dropped). If `check_crc`, the
  // CRC-32C of the nbytes must be crc. Error names file, offset, tensor, expected, found.
  void load(uint32_t index, const std::string& tensor, const std::string& file, uint64_t offset, uint64_t nbytes,
            DType file_dtype, bool packed, bool check_crc, uint32_t crc);
  // A vector that is computed, not stored (inverse frequencies).
  void set_vector(uint32_t index, const float* data, uint32_t n);
  // Row i of table `index` lies at offset + i * stride in file, row_bytes long, followed by its CRC-32C if has_crc.
  void set_table(uint32_t index, const std::string& file, uint64_t offset, uint64_t stride, bool has_crc);

  Matrix matrix(uint32_t index) const;
  const float* vector(uint32_t index) const;
  // Reads and dequantizes one row. Thread-safe. Error as load().
  void table_row(uint32_t index, uint32_t row, float* out) const;
  // Every weight was loaded or set; Error names the index of one that was not.
  void check_complete() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace headrace
