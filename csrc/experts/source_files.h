// The files behind an expert source, opened once. Reads bypass the page cache, or leave nothing behind in it.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace headrace {

// read() may be called from any thread. Errors name the file and the offset.
class SourceFiles {
 public:
  // direct_io: O_DIRECT, until the file system refuses it; then, file by file, buffered reads whose pages are dropped.
  SourceFiles(const std::vector<std::string>& paths, bool direct_io);
  ~SourceFiles();
  SourceFiles(const SourceFiles&) = delete;
  SourceFiles& operator=(const SourceFiles&) = delete;

  // Bytes, when opened.
  std::vector<uint64_t> sizes() const;

  // Bytes that `buffer` needs for read(): whole 4 KiB blocks around the extent.
  static uint64_t window_bytes(uint64_t offset, uint64_t nbytes);
  // Reads the blocks around [offset, offset + nbytes) into `buffer` (4 KiB aligned); the extent then starts at
  // buffer + offset % 4096. Adds the bytes that the reads returned to *bytes_read, also when it throws.
  void read(uint32_t file, uint64_t offset, uint64_t nbytes, uint8_t* buffer, uint64_t* bytes_read);

 private:
  struct File {
    std::string path;
    int fd = -1;
    uint64_t size_bytes = 0;
    std::atomic<bool> direct{false};
  };
  std::vector<std::unique_ptr<File>> files_;
};

}  // namespace headrace
