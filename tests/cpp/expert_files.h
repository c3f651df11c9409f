// Expert sources made of temporary files with known bytes, for the expert memory's tests.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "experts/expert_memory.h"
#include "experts/expert_source.h"
#include "experts/simulator.h"
#include "kernels/kernels.h"
#include "support/error.h"

namespace headrace {

struct LayerSpec {
  std::array<ExpertPart, 3> parts;
  uint32_t num_experts = 0;
  bool packed = false;
};

inline LayerSpec layer_spec(DType type, uint32_t rows, uint32_t cols, uint32_t num_experts, bool packed) {
  return {{ExpertPart{type, rows, cols}, {type, rows, cols}, {type, cols, rows}}, num_experts, packed};
}

// Writes the files on construction and removes them on destruction.
class ExpertFiles {
 public:
  ExpertSource source;
  std::vector<std::vector<std::vector<uint8_t>>> slots;  // [layer][expert]: the bytes that a slot must hold

  // gap_bytes: between extents of rows; at least 4096 keeps each extent's blocks its own.
  ExpertFiles(const std::vector<LayerSpec>& specs, uint64_t seed, uint64_t gap_bytes = kPage) {
    const char* tmp = std::getenv("TMPDIR");
    std::string name = std::string(tmp ? tmp : "/tmp") + "/headrace-experts-XXXXXX";
    if (!mkdtemp(name.data())) throw Error("cannot make " + name);
    directory_ = name;
    std::mt19937_64 random(seed);
    std::array<std::vector<uint8_t>, 2> files;  // rows alternate between two files, records lie in the second
    for (const LayerSpec& spec : specs) {
      LayerExperts layer;
      layer.parts = spec.parts;
      layer.num_experts = spec.num_experts;
      auto& layer_slots = slots.emplace_back();
      for (uint32_t e = 0; e < spec.num_experts; ++e) {
        std::vector<uint8_t> slot(record_bytes(layer), 0);
        for (uint32_t p = 0; p < 3; ++p) {
          const ExpertPart& part = layer.parts[p];
          std::vector<uint8_t> rows(part.rows * row_bytes(part.type, part.cols));
          for (size_t i = 0; i < rows.size(); i += 8) {
            const uint64_t value = random();
            std::memcpy(&rows[i], &value, std::min<size_t>(8, rows.size() - i));
          }
          pack_rows(part.type, part.rows, part.cols, 0, part.rows, rows.data(), slot.data() + part_offset(layer, p));
          if (spec.packed) continue;
          std::vector<uint8_t>& file = files[e % 2];
          file.resize(file.size() + gap_bytes + random() % (gap_bytes + 1));
          layer.rows.push_back({e % 2, file.size()});
          file.insert(file.end(), rows.begin(), rows.end());
        }
        if (spec.packed) {
          std::vector<uint8_t>& file = files[1];
          file.resize(round_up(file.size(), kPage));
          layer.records.push_back({1, file.size()});
          layer.crc.push_back(crc32c(0, slot.data(), slot.size()));
          file.insert(file.end(), slot.begin(), slot.end());
        }
        layer_slots.push_back(std::move(slot));
      }
      source.layers.push_back(std::move(layer));
    }
    for (size_t f = 0; f < files.size(); ++f) {
      source.files.push_back(directory_ + "/experts" + std::to_string(f));
      FILE* out = std::fopen(source.files[f].c_str(), "wb");
      if (!out) throw Error("cannot write " + source.files[f]);
      if (!files[f].empty()) std::fwrite(files[f].data(), 1, files[f].size(), out);
      fflush(out);
      fsync(fileno(out));
      std::fclose(out);
    }
  }
  ~ExpertFiles() {
    std::error_code ignored;
    std::filesystem::remove_all(directory_, ignored);
  }
  ExpertFiles(const ExpertFiles&) = delete;
  ExpertFiles& operator=(const ExpertFiles&) = delete;

  void flip_byte(uint32_t file, uint64_t offset) const {
    const int fd = open(source.files[file].c_str(), O_RDWR);
    uint8_t byte = 0;
    if (pread(fd, &byte, 1, static_cast<off_t>(offset)) != 1) throw Error("cannot read " + source.files[file]);
    byte ^= 0x10;
    if (pwrite(fd, &byte, 1, static_cast<off_t>(offset)) != 1) throw Error("cannot write " + source.files[file]);
    close(fd);
  }

  // Bytes of all records; of the largest one.
  uint64_t total_bytes() const {
    uint64_t n = 0;
    for (const LayerExperts& layer : source.layers) n += layer.num_experts * record_bytes(layer);
    return n;
  }
  uint64_t largest_bytes() const {
    uint64_t n = 0;
    for (const LayerExperts& layer : source.layers) n = std::max(n, record_bytes(layer));
    return n;
  }

  bool slot_equals(uint32_t layer, uint32_t expert, const uint8_t* slot) const {
    const std::vector<uint8_t>& expected = slots[layer][expert];
    return std::memcmp(slot, expected.data(), expected.size()) == 0;
  }

 private:
  std::string directory_;
};

// Installs a read hook for as long as it lives.
class ScopedReadHook {
 public:
  explicit ScopedReadHook(ReadHook hook) { set_read_hook(std::move(hook)); }
  ~ScopedReadHook() { set_read_hook(nullptr); }
  ScopedReadHook(const ScopedReadHook&) = delete;
  ScopedReadHook& operator=(const ScopedReadHook&) = delete;
};

inline void check_same(const SimulatedCounters& simulated, const ExpertCounters& counted) {
  CHECK_EQ(simulated.hits, counted.hits);
  CHECK_EQ(simulated.late_hits, counted.late_hits);
  CHECK_EQ(simulated.loads, counted.loads);
  CHECK_EQ(simulated.prefetches, counted.prefetches);
  CHECK_EQ(simulated.evictions, counted.evictions);
  CHECK_EQ(simulated.bytes_read, counted.bytes_read);
  CHECK_EQ(simulated.bytes_unused, counted.bytes_unused);
}

// One layer of a pass, as an executor runs it: takes up to max_taken, compares bytes, releases. Returns the ids in the
// order in which they were taken.
inline std::vector<uint32_t> run_layer(ExpertMemory& memory, const ExpertFiles& files, uint32_t layer,
                                       const std::vector<uint32_t>& ids, bool in_order = false,
                                       uint32_t max_taken = UINT32_MAX) {
  struct End {
    ExpertMemory& memory;
    ~End() { memory.end(); }
  };
  memory.begin(layer, ids);
  End end{memory};
  std::vector<uint32_t> order, taken;
  while (memory.take(in_order, max_taken, taken, nullptr)) {
    for (uint32_t i : taken) {
      if (!files.slot_equals(layer, ids[i], memory.address(i))) {
        throw Error("wrong bytes: layer " + std::to_string(layer) + " expert " + std::to_string(ids[i]));
      }
      order.push_back(ids[i]);
    }
    for (uint32_t i : taken) memory.release(i);
  }
  return order;
}

}  // namespace headrace
