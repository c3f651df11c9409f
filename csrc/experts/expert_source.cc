#include "experts/expert_source.h"

#include "support/error.h"

namespace headrace {
namespace {

// So that the product of two of them, in bytes, stays far from 2^64.
constexpr uint64_t kMaxExtent = 1 << 24;
constexpr const char* kPartNames[3] = {"gate", "up", "down"};

void check_part(const std::string& where, const ExpertPart& part) {
  if (!is_known_dtype(static_cast<uint32_t>(part.type))) {
    throw Error(where + "expected a known weight type, found type " + std::to_string(static_cast<uint32_t>(part.type)));
  }
  if (part.rows == 0 || part.cols == 0 || part.rows > kMaxExtent || part.cols > kMaxExtent) {
    throw Error(where + "expected 1 to " + std::to_string(kMaxExtent) + " rows and columns, found " +
                std::to_string(part.rows) + " x " + std::to_string(part.cols));
  }
  if (is_quantized(part.type) && part.cols % kQuantBlock != 0) {
    throw Error(where + "expected a multiple of 32 columns, found " + std::to_string(part.cols));
  }
}

void check_extent(const std::string& where, const ExpertSource& source, const std::vector<uint64_t>& file_bytes,
                  const ExpertExtent& extent, uint64_t nbytes) {
  if (extent.file >= file_bytes.size()) {
    throw Error(where + "expected a file index below " + std::to_string(file_bytes.size()) + ", found " +
                std::to_string(extent.file));
  }
  const uint64_t size = file_bytes[extent.file];
  if (nbytes > size || extent.offset > size - nbytes) {
    throw Error(source.files[extent.file] + ": " + where + "expected " + std::to_string(nbytes) + " bytes at offset " +
                std::to_string(extent.offset) + ", found a file of " + std::to_string(size) +
                " bytes; it is truncated or its index is wrong");
  }
}

void check_count(const std::string& where, const char* what, size_t expected, size_t found) {
  if (expected == found) return;
  throw Error(where + "expected " + std::to_string(expected) + " " + what + ", found " + std::to_string(found));
}

}  // namespace

void check_layers(const ExpertSource& source) {
  uint64_t total = 0;
  for (size_t i = 0; i < source.layers.size(); ++i) {
    const LayerExperts& layer = source.layers[i];
    const std::string where = "layer " + std::to_string(i);
    total += layer.num_experts;
    if (layer.num_experts == 0) continue;
    for (int p = 0; p < 3; ++p) check_part(where + " " + kPartNames[p] + ": ", layer.parts[p]);
    if (layer.records.empty()) {
      check_count(where + ": ", "row extents", layer.num_experts * size_t{3}, layer.rows.size());
      continue;
    }
    check_count(where + ": ", "records", layer.num_experts, layer.records.size());
    check_count(where + ": ", "checksums", layer.num_experts, layer.crc.size());
    check_count(where + ": ", "row extents beside records", 0, layer.rows.size());
  }
  if (total == 0) throw Error("expert source: expected at least one expert, found none");
  if (total >= UINT32_MAX) throw Error("expert source: expected under 2^32 experts, found " + std::to_string(total));
}

void check_source(const ExpertSource& source, const std::vector<uint64_t>& file_bytes) {
  check_layers(source);
  for (size_t i = 0; i < source.layers.size(); ++i) {
    const LayerExperts& layer = source.layers[i];
    for (uint32_t e = 0; e < layer.num_experts; ++e) {
      const std::string where = "layer " + std::to_string(i) + " expert " + std::to_string(e);
      if (!layer.records.empty()) {
        const ExpertExtent& record = layer.records[e];
        check_extent(where + ": ", source, file_bytes, record, record_bytes(layer));
        if (record.offset % kPage != 0) {
          throw Error(source.files[record.file] + ": " + where +
                      ": expected a record at a multiple of 4096, found offset " + std::to_string(record.offset));
        }
        continue;
      }
      for (int p = 0; p < 3; ++p) {
        const ExpertPart& part = layer.parts[p];
        check_extent(where + " " + kPartNames[p] + ": ", source, file_bytes, layer.rows[e * size_t{3} + p],
                     part.rows * row_bytes(part.type, part.cols));
      }
    }
  }
}

}  // namespace headrace
