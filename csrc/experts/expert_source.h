// Where experts lie in files. One description serves a GGUF in place, a Hugging Face directory and a store.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/dtype.h"

namespace headrace {

struct ExpertPart {  // gate, up or down of one layer: the same geometry for all its experts
  DType type = DType::kF32;
  uint32_t rows = 0;
  uint32_t cols = 0;
};

struct ExpertExtent {
  uint32_t file = 0;    // index into ExpertSource::files
  uint64_t offset = 0;  // bytes
};

// In a slot, gate, up and down lie in tile layout, one after the other, each at a multiple of 64 bytes.
struct LayerExperts {
  std::array<ExpertPart, 3> parts;  // gate, up, down
  uint32_t num_experts = 0;
  // Rows as the file stores them: three extents an expert [num_experts * 3]. Empty for a packed layer.
  std::vector<ExpertExtent> rows;
  // Packed (a store): one record an expert, exactly the slot's bytes padded to 4 KiB, and its CRC-32C [num_experts].
  std::vector<ExpertExtent> records;
  std::vector<uint32_t> crc;
};

struct ExpertSource {
  std::vector<std::string> files;
  std::vector<LayerExperts> layers;
};

constexpr uint64_t kPage = 4096;
constexpr uint64_t round_up(uint64_t n, uint64_t to) { return (n + to - 1) / to * to; }
constexpr uint64_t part_bytes(const ExpertPart& p) { return round_up(matrix_bytes(p.type, p.rows, p.cols), 64); }
// Offset of part i in a slot, and the record's size padded to 4 KiB.
inline uint64_t part_offset(const LayerExperts& l, int i) {
  uint64_t o = 0;
  for (int j = 0; j < i; ++j) o += part_bytes(l.parts[j]);
  return o;
}
inline uint64_t record_bytes(const LayerExperts& l) { return round_up(part_offset(l, 3), kPage); }

// Throw Error that names layer, expert, file, offset, expected and found.
// Every layer's tables are complete and its geometry is possible, so that no size computed from it overflows.
void check_layers(const ExpertSource& source);
// The same, and every extent lies inside its file. file_bytes: the files' sizes.
void check_source(const ExpertSource& source, const std::vector<uint64_t>& file_bytes);

}  // namespace headrace
