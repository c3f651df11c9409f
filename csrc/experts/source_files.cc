#include "experts/source_files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <mutex>

#include "experts/expert_memory.h"
#include "experts/expert_source.h"
#include "support/error.h"

namespace headrace {
namespace {

std::mutex read_hook_mutex;
std::shared_ptr<const ReadHook> read_hook;

int call_read_hook(const std::string& file, uint64_t offset, uint64_t nbytes) {
  std::shared_ptr<const ReadHook> hook;
  {
    std::lock_guard lock(read_hook_mutex);
    hook = read_hook;
  }
  return hook ? (*hook)(file, offset, nbytes) : 0;
}

constexpr uint64_t round_down(uint64_t n, uint64_t to) { return n / to * to; }

std::string describe(const std::string& path, uint64_t offset, uint64_t nbytes) {
  return path + ": reading " + std::to_string(nbytes) + " bytes at offset " + std::to_string(offset);
}

int open_file(const std::string& path, int flags) {
  int fd = -1;
  do {
    fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | flags);  // O_NONBLOCK: a pipe must not hang us
  } while (fd < 0 && errno == EINTR);
  return fd;
}

}  // namespace

void set_read_hook(ReadHook hook) {
  std::lock_guard lock(read_hook_mutex);
  read_hook = hook ? std::make_shared<const ReadHook>(std::move(hook)) : nullptr;
}

SourceFiles::SourceFiles(const std::vector<std::string>& paths, bool direct_io) {
  try {
    for (const std::string& path : paths) {
      auto& f = *files_.emplace_back(std::make_unique<File>());
      f.path = path;
      f.direct = direct_io;
      f.fd = open_file(path, direct_io ? O_DIRECT : 0);
      if (f.fd < 0 && direct_io && errno == EINVAL) {
        f.direct = false;
        f.fd = open_file(path, 0);
      }
      if (f.fd < 0) throw Error(path + ": cannot open: " + std::strerror(errno));
      struct stat st;
      if (fstat(f.fd, &st) != 0) throw Error(path + ": cannot stat: " + std::strerror(errno));
      if (!S_ISREG(st.st_mode)) throw Error(path + ": expected a regular file");
      f.size_bytes = static_cast<uint64_t>(st.st_size);
      posix_fadvise(f.fd, 0, 0, POSIX_FADV_RANDOM);  // no read-ahead: its pages would stay behind
    }
  } catch (...) {
    for (auto& f : files_) {
      if (f->fd >= 0) close(f->fd);
    }
    throw;
  }
}

SourceFiles::~SourceFiles() {
  for (auto& f : files_) close(f->fd);
}

std::vector<uint64_t> SourceFiles::sizes() const {
  std::vector<uint64_t> sizes;
  for (const auto& f : files_) sizes.push_back(f->size_bytes);
  return sizes;
}

uint64_t SourceFiles::window_bytes(uint64_t offset, uint64_t nbytes) {
  return round_up(offset + nbytes, kPage) - round_down(offset, kPage);
}

void SourceFiles::read(uint32_t file, uint64_t offset, uint64_t nbytes, uint8_t* buffer, uint64_t* bytes_read) {
  File& f = *files_[file];
  const uint64_t begin = round_down(offset, kPage);
  const uint64_t window = window_bytes(offset, nbytes);
  const uint64_t needed = offset + nbytes - begin;  // the window may reach beyond the end of the file, the extent not
  uint64_t got = 0;
  while (got < needed) {
    const bool direct = f.direct;
    uint64_t ask = window - got;
    const int injected = call_read_hook(f.path, begin + got, ask);
    if (injected == -1) ask = std::max(kPage, round_down(ask / 2, kPage));
    ssize_t n = -1;
    if (injected > 0) {
      errno = injected;
    } else {
      n = pread(f.fd, buffer + got, ask, static_cast<off_t>(begin + got));
    }
    if (n < 0) {
      if (errno == EINTR) continue;
      if (errno == EINVAL && direct) {  // refused; other threads may find the same at the same time
        fcntl(f.fd, F_SETFL, fcntl(f.fd, F_GETFL) & ~O_DIRECT);
        f.direct = false;
        continue;
      }
      throw Error(describe(f.path, offset, nbytes) + ": " + std::strerror(errno));
    }
    *bytes_read += static_cast<uint64_t>(n);
    if (!direct) posix_fadvise(f.fd, static_cast<off_t>(begin + got), static_cast<off_t>(ask), POSIX_FADV_DONTNEED);
    const uint64_t end = got + static_cast<uint64_t>(n);
    if (end >= needed) return;
    // Go on at a block boundary, as O_DIRECT must. Not even one block: the file has become shorter.
    const uint64_t next = round_down(end, kPage);
    if (next == got) {
      struct stat st = {};
      fstat(f.fd, &st);
      throw Error(describe(f.path, offset, nbytes) + ": expected a file of " + std::to_string(f.size_bytes) +
                  " bytes, found " + std::to_string(st.st_size) + "; it was cut or replaced while in use");
    }
    got = next;
  }
}

}  // namespace headrace
