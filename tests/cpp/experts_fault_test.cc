#include <atomic>
#include <cerrno>
#include <chrono>
#include <mutex>
#include <numeric>
#include <thread>

#include "check.h"
#include "expert_files.h"

using namespace headrace;

namespace {

using Ids = std::vector<uint32_t>;

Ids all_ids(uint32_t n) {
  Ids ids(n);
  std::iota(ids.begin(), ids.end(), 0);
  return ids;
}

std::vector<LayerSpec> both_kinds() {
  return {layer_spec(DType::kQ8_0, 64, 96, 6, true), layer_spec(DType::kF16, 50, 70, 6, false)};
}

std::string text(uint64_t n) { return std::to_string(n); }

void sleep_ms(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

}  // namespace

TEST("a failed read is thrown with its place; the expert can be loaded in the next pass") {
  const ExpertFiles files(both_kinds(), 1);
  for (uint32_t threads : {1u, 3u}) {
    for (uint32_t layer : {0u, 1u}) {
      const LayerExperts& l = files.source.layers[layer];
      const ExpertExtent bad = layer == 0 ? l.records[2] : l.rows[2 * 3 + 1];
      std::atomic<bool> broken{true};
      ScopedReadHook hook([&](const std::string& file, uint64_t offset, uint64_t) {
        return broken && file == files.source.files[bad.file] && offset == bad.offset / kPage * kPage ? EIO : 0;
      });
      ExpertMemory memory(files.source, {files.total_bytes(), threads, true});
      const std::string where = "layer " + text(layer) + " expert 2: " + files.source.files[bad.file];
      for (int attempt : {0, 1}) {
        CHECK_THROWS(Error, where.c_str(), run_layer(memory, files, layer, all_ids(6), true));
        CHECK_THROWS(Error, ("at offset " + text(bad.offset)).c_str(), run_layer(memory, files, layer, {2}));
        CHECK_THROWS(Error, "Input/output error", run_layer(memory, files, layer, {2}));
        CHECK(memory.resident_experts() < 6);
        CHECK_EQ(attempt, attempt);
      }
      broken = false;
      CHECK(run_layer(memory, files, layer, all_ids(6), true) == all_ids(6));
      CHECK_EQ(memory.resident_experts(), 6u);
      const ExpertCounters c = memory.counters();
      CHECK_EQ(c.hits + c.late_hits + c.loads, 2 * (6u + 1 + 1) + 6);
      CHECK(memory.committed_bytes() <= memory.arena_bytes());
    }
  }
}

TEST("interrupted and short reads go on where they stopped") {
  const ExpertFiles files({layer_spec(DType::kF32, 500, 700, 2, true), layer_spec(DType::kF32, 500, 700, 2, false)}, 2);
  for (bool direct : {true, false}) {
    std::atomic<uint32_t> calls{0};
    ScopedReadHook hook([&](const std::string&, uint64_t, uint64_t) {
      const uint32_t n = calls++ % 4;
      return n == 1 ? EINTR : n == 2 ? -1 : 0;
    });
    ExpertMemory memory(files.source, {files.total_bytes(), 2, direct});
    for (uint32_t layer : {0u, 1u}) CHECK(run_layer(memory, files, layer, {0, 1}, true) == (Ids{0, 1}));
  }
}

TEST("where O_DIRECT is refused at the first read, reads are buffered") {
  const ExpertFiles files(both_kinds(), 3);
  std::atomic<int> refusals{0};
  std::mutex mutex;
  std::vector<std::string> refused;
  ScopedReadHook hook([&](const std::string& file, uint64_t, uint64_t) {
    std::lock_guard lock(mutex);
    if (std::count(refused.begin(), refused.end(), file)) return 0;
    refused.push_back(file);
    ++refusals;
    return EINVAL;
  });
  ExpertMemory memory(files.source, {files.total_bytes(), 2, true});
  for (uint32_t layer : {0u, 1u}) CHECK(run_layer(memory, files, layer, all_ids(6), true) == all_ids(6));
  CHECK_EQ(refusals.load(), 2);
}

TEST("a buffered read that is refused is an error, not a loop") {
  const ExpertFiles files(both_kinds(), 4);
  ScopedReadHook hook([](const std::string&, uint64_t, uint64_t) { return EINVAL; });
  ExpertMemory memory(files.source, {files.total_bytes(), 2, true});
  CHECK_THROWS(Error, "Invalid argument", run_layer(memory, files, 0, {0}));
}

TEST("a file that shrinks while in use is an error") {
  for (bool direct : {true, false}) {
    for (uint32_t layer : {0u, 1u}) {
      const ExpertFiles files(both_kinds(), 5);
      ExpertMemory memory(files.source, {files.total_bytes(), 2, direct});
      const LayerExperts& l = files.source.layers[layer];
      const ExpertExtent cut = layer == 0 ? l.records[3] : l.rows[3 * 3];
      CHECK_EQ(truncate(files.source.files[cut.file].c_str(), static_cast<off_t>(cut.offset + 1000)), 0);
      CHECK_THROWS(Error, ("bytes, found " + text(cut.offset + 1000)).c_str(), run_layer(memory, files, layer, {3}));
      CHECK_THROWS(Error, "cut or replaced", run_layer(memory, files, layer, {5}));
      CHECK(run_layer(memory, files, layer, {0, 2}, true) == (Ids{0, 2}));
    }
  }
}

TEST("a flipped byte anywhere in a record is found, also with several pieces and threads") {
  const ExpertFiles files({layer_spec(DType::kF32, 400, 900, 3, true)}, 6);
  const ExpertExtent record = files.source.layers[0].records[1];
  const uint64_t nbytes = record_bytes(files.source.layers[0]);
  for (uint32_t threads : {1u, 4u}) {
    for (uint64_t at : {uint64_t{0}, nbytes / 2, nbytes - 1}) {
      files.flip_byte(record.file, record.offset + at);
      ExpertMemory memory(files.source, {files.total_bytes(), threads, true});
      CHECK_THROWS(Error, "layer 0 expert 1: ", run_layer(memory, files, 0, all_ids(3), true));
      CHECK_THROWS(Error, "expected CRC-32C", run_layer(memory, files, 0, {1}));
      CHECK(memory.counters().bytes_unused >= 2 * nbytes);
      files.flip_byte(record.file, record.offset + at);
      CHECK(run_layer(memory, files, 0, all_ids(3), true) == all_ids(3));
    }
  }
}

TEST("tables and files that cannot be are refused at construction") {
  const ExpertFiles files(both_kinds(), 7);
  const ExpertMemoryOptions options{files.total_bytes(), 2, true};
  const auto with = [&](auto change) {
    ExpertSource source = files.source;
    change(source);
    return source;
  };
  const auto refused = [&](const char* part, auto change) {
    CHECK_THROWS(Error, part, ExpertMemory(with(change), options));
  };
  refused("layer 0 expert 5: expected", [](auto& s) { s.layers[0].records[5].offset += 1 << 30; });
  refused("layer 1 expert 0 up: expected", [](auto& s) { s.layers[1].rows[1].offset = UINT64_MAX - 5; });
  refused("found a file of", [](auto& s) { s.layers[0].records[1].offset = UINT64_MAX / kPage * kPage; });
  refused("multiple of 4096", [](auto& s) { s.layers[0].records[0].offset += 512; });
  refused("file index below 2, found 2", [](auto& s) { s.layers[1].rows[4].file = 2; });
  refused("expected 6 records, found 5", [](auto& s) { s.layers[0].records.pop_back(); });
  refused("expected 6 checksums, found 0", [](auto& s) { s.layers[0].crc.clear(); });
  refused("expected 18 row extents, found 17", [](auto& s) { s.layers[1].rows.pop_back(); });
  refused("beside records", [](auto& s) { s.layers[0].rows.resize(18); });
  refused("rows and columns, found 0 x", [](auto& s) { s.layers[1].parts[2].rows = 0; });
  refused("rows and columns", [](auto& s) { s.layers[1].parts[0].cols = UINT32_MAX; });
  refused("layer 1 gate: expected", [](auto& s) {
    s.layers[1].parts[0].rows = 1 << 24;
    s.layers[1].parts[0].cols = 0;
  });
  refused("layer 1 expert 0 gate: expected", [](auto& s) { s.layers[1].parts[0].rows = 1 << 24; });
  refused("multiple of 32", [](auto& s) { s.layers[0].parts[1].cols = 40; });
  refused("known weight type, found type 7", [](auto& s) { s.layers[0].parts[0].type = static_cast<DType>(7); });
  refused("at least one expert", [](auto& s) { s.layers.clear(); });
  refused("No such file", [](auto& s) { s.files[1] += ".gone"; });
  refused("regular file", [](auto& s) { s.files[1] = std::string("/dev/null"); });
  refused("regular file", [](auto& s) { s.files[1] = std::string("/proc"); });
  CHECK_THROWS(Error, "at least the largest expert", ExpertMemory(files.source, {files.largest_bytes() - 1, 2, true}));
  CHECK_THROWS(Error, "loader threads, found 0", ExpertMemory(files.source, {files.total_bytes(), 0, true}));
}

TEST("destruction with queued work waits for reads in flight only") {
  const ExpertFiles files({layer_spec(DType::kQ4_0, 32, 64, 60, true)}, 8);
  std::atomic<int> reads{0};
  ScopedReadHook hook([&](const std::string&, uint64_t, uint64_t) {
    ++reads;
    sleep_ms(30);
    return 0;
  });
  {
    ExpertMemory memory(files.source, {files.total_bytes(), 2, true});
    memory.begin(0, all_ids(60));
    sleep_ms(10);
  }
  CHECK(reads <= 6);
}

TEST("end after an error stops a record of many pieces") {
  const ExpertFiles files({layer_spec(DType::kF32, 1000, 1024, 2, true)}, 9);
  std::atomic<int> reads{0};
  std::atomic<bool> slow{true};
  ScopedReadHook hook([&](const std::string&, uint64_t, uint64_t) {
    ++reads;
    if (slow) sleep_ms(20);
    return 0;
  });
  ExpertMemory memory(files.source, {files.total_bytes(), 2, true});
  memory.begin(0, all_ids(2));
  sleep_ms(30);
  memory.end();
  CHECK(reads < 24);
  CHECK_EQ(memory.resident_experts(), 0u);
  CHECK_EQ(memory.counters().bytes_unused, memory.counters().bytes_read);
  slow = false;
  CHECK(run_layer(memory, files, 0, all_ids(2), true) == all_ids(2));
}
