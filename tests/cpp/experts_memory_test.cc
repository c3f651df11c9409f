#include <sys/mman.h>
#include <sys/stat.h>

#include <atomic>
#include <chrono>
#include <fstream>
#include <numeric>
#include <set>
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

// Resident bytes of the mapping that holds `address`, as the system counts them.
uint64_t mapped_resident_bytes(const void* address) {
  std::ifstream smaps("/proc/self/smaps");
  std::string line;
  bool inside = false;
  while (std::getline(smaps, line)) {
    unsigned long begin = 0, end = 0, kib = 0;
    if (std::sscanf(line.c_str(), "%lx-%lx ", &begin, &end) == 2 && line.find(':') > line.find(' ')) {
      inside = begin <= reinterpret_cast<uintptr_t>(address) && reinterpret_cast<uintptr_t>(address) < end;
    } else if (inside && std::sscanf(line.c_str(), "Rss: %lu kB", &kib) == 1) {
      return kib * 1024;
    }
  }
  return 0;
}

// Runs one expert so that its address is known, and returns the arena's resident bytes.
uint64_t arena_resident_bytes(ExpertMemory& memory, uint32_t layer, uint32_t expert) {
  const Ids ids = {expert};
  std::vector<uint32_t> taken;
  memory.begin(layer, ids);
  memory.take(true, 1, taken, nullptr);
  const uint64_t n = mapped_resident_bytes(memory.address(0));
  memory.end();
  return n;
}

uint64_t page_cache_bytes(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY);
  struct stat st;
  fstat(fd, &st);
  void* map = mmap(nullptr, st.st_size, PROT_READ, MAP_SHARED, fd, 0);
  std::vector<unsigned char> pages((st.st_size + kPage - 1) / kPage);
  mincore(map, st.st_size, pages.data());
  munmap(map, st.st_size);
  close(fd);
  return kPage * std::count_if(pages.begin(), pages.end(), [](unsigned char p) { return p & 1; });
}

// A layer of small packed records, all of one size.
std::vector<LayerSpec> small_layers(uint32_t num_layers, uint32_t num_experts) {
  return std::vector<LayerSpec>(num_layers, layer_spec(DType::kQ4_0, 32, 64, num_experts, true));
}

}  // namespace

TEST("every type, both sources, direct and buffered: a slot holds exactly the expert's bytes") {
  std::vector<LayerSpec> specs;
  for (DType type : {DType::kF32, DType::kF16, DType::kBF16, DType::kQ4_0, DType::kQ8_0}) {
    for (bool packed : {false, true}) {
      specs.push_back(layer_spec(type, 32, 96, 3, packed));
      if (!is_quantized(type)) specs.push_back(layer_spec(type, 37, 51, 2, packed));
    }
  }
  specs.push_back({{ExpertPart{DType::kQ4_0, 17, 32}, {DType::kQ8_0, 1, 64}, {DType::kF16, 33, 1}}, 2, false});
  specs.push_back(layer_spec(DType::kF32, 700, 611, 2, false));  // several pieces a part
  specs.push_back(layer_spec(DType::kF32, 700, 611, 2, true));
  for (uint64_t gap_bytes : {uint64_t{0}, kPage}) {
    const ExpertFiles files(specs, 1, gap_bytes);
    for (bool direct : {true, false}) {
      ExpertMemory memory(files.source, {files.total_bytes(), 2, direct});
      for (uint32_t layer = 0; layer < specs.size(); ++layer) {
        const Ids ids = all_ids(specs[layer].num_experts);
        CHECK(run_layer(memory, files, layer, ids, true) == ids);
      }
      CHECK_EQ(memory.resident_experts(), memory.total_experts());
      CHECK_EQ(memory.counters().loads, memory.total_experts());
      CHECK_EQ(memory.counters().bytes_unused, 0u);
    }
  }
}

TEST("an arena of one record runs a whole layer in storage order, each expert read once") {
  const ExpertFiles files({layer_spec(DType::kQ8_0, 32, 64, 9, true), layer_spec(DType::kF16, 20, 33, 9, false)}, 2);
  std::multiset<std::pair<std::string, uint64_t>> reads;
  ScopedReadHook hook([&](const std::string& file, uint64_t offset, uint64_t) {
    reads.emplace(file, offset);  // one loader thread
    return 0;
  });
  ExpertMemory memory(files.source, {files.largest_bytes(), 1, true});
  CHECK_EQ(memory.num_slots(), 1u);
  for (bool in_order : {true, false}) {
    for (uint32_t layer : {0u, 1u}) {
      reads.clear();
      CHECK(run_layer(memory, files, layer, all_ids(9), in_order) == all_ids(9));
      CHECK_EQ(reads.size(), layer == 0 ? 9u : 27u);
      for (const auto& read : reads) CHECK_EQ(reads.count(read), 1u);
      CHECK_EQ(memory.resident_experts(), 1u);
      CHECK(memory.committed_bytes() <= memory.arena_bytes());
    }
  }
  CHECK_EQ(memory.counters().loads, 36u);
  CHECK_EQ(memory.counters().hits, 0u);
}

TEST("the least recently used expert over all layers goes first") {
  const ExpertFiles files(small_layers(3, 4), 3);
  const uint64_t record = files.largest_bytes();
  ExpertMemory memory(files.source, {4 * record, 2, true});
  run_layer(memory, files, 0, {0, 1});
  run_layer(memory, files, 1, {2, 3});
  run_layer(memory, files, 0, {0});  // layer 0: expert 1 is now the oldest
  CHECK_EQ(memory.counters().hits, 1u);
  run_layer(memory, files, 2, {0});  // takes its place
  run_layer(memory, files, 1, {2, 3});
  CHECK_EQ(memory.counters().hits, 3u);
  run_layer(memory, files, 0, {0});
  CHECK_EQ(memory.counters().hits, 4u);
  run_layer(memory, files, 0, {1});
  const ExpertCounters c = memory.counters();
  CHECK_EQ(c.hits, 4u);
  CHECK_EQ(c.loads, 6u);
  CHECK_EQ(c.bytes_read, 6 * record);
  CHECK_EQ(c.late_hits + c.prefetches + c.bytes_unused, 0u);
}

TEST("hits that fill the arena: the furthest is given up for a missing expert before it, and counts as a load") {
  const ExpertFiles files(small_layers(1, 8), 4);
  for (bool in_order : {true, false}) {
    ExpertMemory memory(files.source, {3 * files.largest_bytes(), 2, true});
    run_layer(memory, files, 0, {2, 4, 6});
    const Ids ids = {1, 2, 4, 5, 6};
    const Ids order = run_layer(memory, files, 0, ids, in_order, 1);
    if (in_order) CHECK(order == ids);
    CHECK_EQ(std::set<uint32_t>(order.begin(), order.end()).size(), 5u);
    CHECK_EQ(memory.counters().hits, 2u);
    CHECK_EQ(memory.counters().loads, 3u + 3u);
  }
  // Missing experts behind every hit need no hit's slot before it is released.
  ExpertMemory memory(files.source, {3 * files.largest_bytes(), 2, true});
  run_layer(memory, files, 0, {2, 4, 6});
  CHECK(run_layer(memory, files, 0, {2, 4, 6, 7}, true) == (Ids{2, 4, 6, 7}));
  CHECK_EQ(memory.counters().hits, 3u);
  CHECK_EQ(memory.counters().loads, 4u);
}

TEST("an executor that keeps what it took costs hits, not a hang") {
  const ExpertFiles files(small_layers(1, 8), 15);
  ExpertMemory memory(files.source, {3 * files.largest_bytes(), 2, true});
  run_layer(memory, files, 0, {4, 5});
  const Ids ids = {1, 2, 4, 5};
  std::vector<uint32_t> taken;
  memory.begin(0, ids);
  for (uint32_t i : {0u, 1u}) {  // expert 2 finds 1 in use and 4, 5 pinned: 5 is given up
    CHECK(memory.take(true, 1, taken, nullptr));
    CHECK(taken == Ids{i});
  }
  for (uint32_t i : {0u, 1u}) {
    CHECK(files.slot_equals(0, ids[i], memory.address(i)));
    memory.release(i);
  }
  for (uint32_t i : {2u, 3u}) {
    CHECK(memory.take(true, 1, taken, nullptr));
    CHECK(taken == Ids{i} && files.slot_equals(0, ids[i], memory.address(i)));
  }
  memory.end();
  CHECK_EQ(memory.counters().hits, 1u);
  CHECK_EQ(memory.counters().loads, 2u + 3u);
}

TEST("take gives ready experts ascending, in storage order if asked, at most max_taken") {
  const ExpertFiles files(small_layers(1, 6), 5);
  std::atomic<bool> hold{true};
  const uint64_t held_offset = files.source.layers[0].records[1].offset;
  ScopedReadHook hook([&](const std::string&, uint64_t offset, uint64_t) {
    while (offset == held_offset && hold) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return 0;
  });
  ExpertMemory memory(files.source, {files.total_bytes(), 2, true});
  std::vector<uint32_t> taken;
  run_layer(memory, files, 0, {0, 2, 3, 5});
  const Ids ids = {0, 1, 2, 3, 5};
  memory.begin(0, ids);
  CHECK(memory.take(true, 9, taken, nullptr));
  CHECK(taken == Ids{0});  // expert 1 is on its way
  CHECK(memory.take(false, 2, taken, nullptr));
  CHECK(taken == (Ids{2, 3}));
  memory.release(3);
  hold = false;
  CHECK(memory.take(true, 9, taken, nullptr));
  CHECK(taken == (Ids{1, 4}));  // 2 and 3 were taken before
  CHECK(files.slot_equals(0, 1, memory.address(1)));
  CHECK(!memory.take(false, 9, taken, nullptr));
  CHECK(taken.empty());
  memory.end();
  CHECK(memory.counters().io_wait_ns > 0);
}

TEST("a layer without routes, and layers without experts") {
  std::vector<LayerSpec> specs = small_layers(1, 2);
  specs.insert(specs.begin(), LayerSpec{});
  const ExpertFiles files(specs, 6);
  ExpertMemory memory(files.source, {files.total_bytes(), 1, true});
  CHECK(run_layer(memory, files, 1, {}).empty());
  CHECK(run_layer(memory, files, 0, {}).empty());
  CHECK_EQ(memory.counters().hits + memory.counters().loads, 0u);
  memory.end();  // harmless
  CHECK(run_layer(memory, files, 1, {0, 1}, true) == (Ids{0, 1}));
}

TEST("misuse is an error that leaves the memory usable") {
  const ExpertFiles files(small_layers(2, 4), 7);
  ExpertMemory memory(files.source, {2 * files.largest_bytes(), 2, true});
  std::vector<uint32_t> taken;
  CHECK_THROWS(Error, "begin", memory.take(true, 1, taken, nullptr));
  CHECK_THROWS(Error, "begin", memory.release(0));
  CHECK_THROWS(Error, "expected a layer below 2, found 2", memory.begin(2, Ids{0}));
  CHECK_THROWS(Error, "below 4, found 4", memory.begin(0, Ids{0, 4}));
  CHECK_THROWS(Error, "ascending", memory.begin(0, Ids{1, 1}));
  CHECK_THROWS(Error, "ascending", memory.begin(0, Ids{2, 1}));
  memory.begin(0, Ids{0, 1, 2});
  CHECK_THROWS(Error, "before end() of layer 0", memory.begin(1, Ids{0}));
  CHECK_THROWS(Error, "during layer 0", memory.resize(files.total_bytes()));
  CHECK_THROWS(Error, "taken expert", memory.address(0));
  CHECK_THROWS(Error, "max_taken", memory.take(true, 0, taken, nullptr));
  uint32_t num_taken = 0;
  while (num_taken < 2) {
    memory.take(true, 2, taken, nullptr);
    num_taken += taken.size();
  }
  CHECK_THROWS(Error, "release experts", memory.take(true, 1, taken, nullptr));
  memory.release(0);
  CHECK_THROWS(Error, "taken expert", memory.release(0));
  CHECK_THROWS(Error, "taken expert", memory.release(7));
  CHECK(memory.take(true, 1, taken, nullptr));
  CHECK(taken == Ids{2});
  memory.end();
  CHECK(run_layer(memory, files, 1, all_ids(4), true) == all_ids(4));
  CHECK_EQ(memory.counters().loads, 7u);
}

TEST("an abandoned layer drops its loads; what landed and was never taken is unused once evicted") {
  const ExpertFiles files(small_layers(1, 8), 8);
  const uint64_t record = files.largest_bytes();
  std::atomic<int> reads{0};
  ScopedReadHook hook([&](const std::string&, uint64_t, uint64_t) {
    ++reads;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    return 0;
  });
  ExpertMemory memory(files.source, {6 * record, 1, true});
  std::vector<uint32_t> taken;
  memory.begin(0, Ids{0, 1, 2, 3, 4, 5, 6});
  CHECK(memory.take(true, 1, taken, nullptr));
  memory.end();
  const uint64_t landed = memory.resident_experts();
  CHECK_EQ(landed, static_cast<uint64_t>(reads));
  CHECK(landed >= 1 && landed < 6);
  CHECK_EQ(memory.counters().loads, 7u);
  CHECK_EQ(memory.counters().bytes_read, landed * record);
  CHECK_EQ(memory.counters().bytes_unused, 0u);
  memory.resize(record);
  CHECK(run_layer(memory, files, 0, {7}) == Ids{7});
  CHECK_EQ(memory.counters().bytes_unused, (landed - 1) * record);
  CHECK(run_layer(memory, files, 0, all_ids(8), true) == all_ids(8));
}

TEST("should_stop is asked while waiting; the memory stays usable") {
  const ExpertFiles files(small_layers(1, 4), 9);
  std::atomic<int> delay_ms{300};
  ScopedReadHook hook([&](const std::string&, uint64_t, uint64_t) {
    std::this_thread::sleep_for(std::chrono::milliseconds(delay_ms));
    return 0;
  });
  ExpertMemory memory(files.source, {files.total_bytes(), 1, true});
  std::vector<uint32_t> taken;
  int asked = 0;
  memory.begin(0, all_ids(4));
  CHECK_THROWS(Cancelled, "cancelled", memory.take(true, 1, taken, [&] { return ++asked == 3; }));
  CHECK_EQ(asked, 3);
  memory.counters();  // from a callback or another thread: no lock is held
  memory.end();
  delay_ms = 0;
  CHECK(run_layer(memory, files, 0, all_ids(4), true) == all_ids(4));
  const ExpertCounters c = memory.counters();
  CHECK_EQ(c.hits + c.loads, 8u);
}

TEST("should_stop may call into the memory") {
  const ExpertFiles files(small_layers(1, 2), 10);
  ScopedReadHook hook([](const std::string&, uint64_t, uint64_t) {
    std::this_thread::sleep_for(std::chrono::milliseconds(60));
    return 0;
  });
  ExpertMemory memory(files.source, {files.total_bytes(), 1, true});
  std::vector<uint32_t> taken;
  memory.begin(0, Ids{0});
  uint64_t loads = 0;
  CHECK(memory.take(true, 1, taken, [&] {
    loads = memory.counters().loads;
    return false;
  }));
  CHECK_EQ(loads, 1u);
  memory.end();
}

TEST("committed bytes are what the system holds, under the ceiling, through resizes and records of four sizes") {
  const ExpertFiles files({layer_spec(DType::kF32, 64, 96, 4, true), layer_spec(DType::kQ4_0, 96, 64, 8, false),
                           layer_spec(DType::kF16, 48, 100, 6, true), layer_spec(DType::kF32, 250, 60, 3, false)},
                          11);
  const uint64_t largest = files.largest_bytes();
  ExpertMemory memory(files.source, {3 * largest + kPage + 5, 2, true});
  CHECK_EQ(memory.num_slots(), 3u);
  CHECK_EQ(memory.committed_bytes(), 3 * largest);
  std::mt19937 random(12);
  for (int step = 0; step < 60; ++step) {
    const uint32_t layer = random() % 4;
    if (step % 7 == 6) {
      memory.resize(largest + random() % files.total_bytes());
      CHECK(memory.committed_bytes() <= memory.arena_bytes());
    }
    Ids ids;
    for (uint32_t e = 0; e < files.source.layers[layer].num_experts; ++e) {
      if (random() % 2) ids.push_back(e);
    }
    run_layer(memory, files, layer, ids, random() % 2);
    CHECK(memory.committed_bytes() <= memory.arena_bytes());
    if (ids.empty()) continue;
    CHECK_EQ(arena_resident_bytes(memory, layer, ids.back()), memory.committed_bytes());
  }
  memory.resize(files.total_bytes());
  for (int round : {0, 1}) {
    const uint64_t loads = memory.counters().loads;
    for (uint32_t layer = 0; layer < 4; ++layer) {
      run_layer(memory, files, layer, all_ids(files.source.layers[layer].num_experts));
    }
    if (round == 1) CHECK_EQ(memory.counters().loads, loads);  // everything resident, to the byte
  }
  CHECK_EQ(memory.resident_experts(), memory.total_experts());
  CHECK_EQ(memory.committed_bytes(), files.total_bytes());
  memory.resize(largest);
  CHECK_EQ(arena_resident_bytes(memory, 0, 0), memory.committed_bytes());
  CHECK(memory.committed_bytes() <= largest);
  CHECK_THROWS(Error, "at least the largest expert", memory.resize(largest - 1));
}

TEST("reads leave nothing in the page cache") {
  const ExpertFiles files({layer_spec(DType::kF32, 300, 200, 4, false), layer_spec(DType::kF32, 300, 200, 4, true)},
                          13);
  for (bool direct : {true, false}) {
    for (const std::string& path : files.source.files) {
      const int fd = open(path.c_str(), O_RDONLY);
      posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
      close(fd);
      if (page_cache_bytes(path) > 0) return;  // a file system that lives in memory
    }
    ExpertMemory memory(files.source, {files.total_bytes(), 2, direct});
    for (uint32_t layer : {0u, 1u}) run_layer(memory, files, layer, all_ids(4));
    for (const std::string& path : files.source.files) CHECK_EQ(page_cache_bytes(path), 0u);
  }
}

TEST("overhead counts staging for rows only") {
  const ExpertFiles files({layer_spec(DType::kF32, 300, 1000, 2, true)}, 14);
  const ExpertFiles rows({layer_spec(DType::kF32, 300, 1000, 2, false)}, 14);
  const uint64_t packed_bytes = ExpertMemory::overhead_bytes(files.source, {files.total_bytes(), 2, true});
  const uint64_t rows_bytes = ExpertMemory::overhead_bytes(rows.source, {rows.total_bytes(), 2, true});
  CHECK(packed_bytes > 0 && packed_bytes < 1 << 20);
  CHECK(rows_bytes > packed_bytes + (2 << 20) - (1 << 17));
}
