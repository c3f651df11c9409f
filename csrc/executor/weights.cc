#include "executor/weights.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>
#include <vector>

#include "executor/mapping.h"
#include "experts/expert_source.h"
#include "support/error.h"

namespace headrace {

namespace {

constexpr uint64_t kStagingBytes = 1 << 20;

std::string str(uint64_t n) { return std::to_string(n); }

// A file read with pread; every length is checked before and after.
class File {
 public:
  explicit File(const std::string& path) : path_(path), fd_(open(path.c_str(), O_RDONLY | O_CLOEXEC)) {
    if (fd_ < 0) throw Error(path + ": cannot open: " + std::strerror(errno));
    struct stat st{};
    if (fstat(fd_, &st) != 0 || !S_ISREG(st.st_mode)) {
      close(fd_);
      throw Error(path + ": not a regular file");
    }
    size_bytes_ = static_cast<uint64_t>(st.st_size);
    posix_fadvise(fd_, 0, 0, POSIX_FADV_RANDOM);  // no readahead beyond what is asked for
  }
  ~File() { close(fd_); }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  void expect_inside(const std::string& what, uint64_t offset, uint64_t nbytes) const {
    if (offset <= size_bytes_ && nbytes <= size_bytes_ - offset) return;
    throw Error(at(what, offset) + "expected " + str(nbytes) + " bytes, but the file ends at " + str(size_bytes_) +
                "; it is truncated, get it again");
  }
  void read(const std::string& what, uint64_t offset, uint64_t nbytes, uint8_t* out) const {
    for (uint64_t done = 0; done < nbytes;) {
      ssize_t n = pread(fd_, out + done, nbytes - done, static_cast<off_t>(offset + done));
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) throw Error(at(what, offset + done) + "read failed: " + std::strerror(errno));
      if (n == 0)
        throw Error(at(what, offset) + "expected " + str(nbytes) + " bytes, found " + str(done) +
                    "; the file was cut while in use");
      done += static_cast<uint64_t>(n);
    }
  }
  // Pages that lie in the range, whole or in part, leave the page cache.
  void drop_pages(uint64_t offset, uint64_t nbytes) const {
    uint64_t begin = offset / kPage * kPage, end = round_up(offset + nbytes, kPage);
    posix_fadvise(fd_, static_cast<off_t>(begin), static_cast<off_t>(end - begin), POSIX_FADV_DONTNEED);
  }
  std::string at(const std::string& what, uint64_t offset) const {
    return path_ + ": " + what + " at offset " + str(offset) + ": ";
  }

 private:
  std::string path_;
  int fd_;
  uint64_t size_bytes_ = 0;
};

std::string damaged(const File& file, const std::string& what, uint64_t offset, uint32_t expected, uint32_t found) {
  char sums[80];
  std::snprintf(sums, sizeof sums, "expected CRC-32C 0x%08x, found 0x%08x", expected, found);
  return file.at(what, offset) + sums + "; the file is damaged, get or pack it again";
}

// Reads a tensor once, in order, in pieces, with its checksum, leaving nothing in the page cache.
class TensorReader {
 public:
  TensorReader(const std::string& path, const std::string& tensor, uint64_t offset, uint64_t nbytes)
      : file_(path), what_("tensor " + tensor), offset_(offset), nbytes_(nbytes) {
    file_.expect_inside(what_, offset, nbytes);
  }
  void next(uint8_t* out, uint64_t n) {
    file_.read(what_, offset_ + done_, n, out);
    file_.drop_pages(offset_ + done_, n);
    crc_ = crc32c(crc_, out, n);
    done_ += n;
  }
  void check_crc(uint32_t expected) const {
    if (crc_ != expected) throw Error(damaged(file_, what_, offset_, expected, crc_));
  }
  void expect_bytes(uint64_t expected) const {
    if (nbytes_ != expected)
      throw Error(file_.at(what_, offset_) + str(nbytes_) + " bytes, expected " + str(expected) +
                  " for the shape in the model's config");
  }
  void expect_type(bool ok, DType found) const {
    if (!ok) throw Error(file_.at(what_, offset_) + "type " + str(static_cast<uint32_t>(found)) + " does not fit");
  }

 private:
  File file_;
  std::string what_;
  uint64_t offset_, nbytes_, done_ = 0;
  uint32_t crc_ = 0;
};

void load_packed(TensorReader& in, const Matrix& w, uint8_t* out) {
  uint64_t nbytes = matrix_bytes(w.type, w.rows, w.cols);
  in.expect_bytes(nbytes);
  for (uint64_t at = 0; at < nbytes; at += kStagingBytes) in.next(out + at, std::min(kStagingBytes, nbytes - at));
}

void load_rows(TensorReader& in, const Matrix& w, uint8_t* out) {
  uint64_t one = row_bytes(w.type, w.cols);
  in.expect_bytes(one * w.rows);
  uint32_t step = static_cast<uint32_t>(std::max<uint64_t>(1, kStagingBytes / (one * kTileRows))) * kTileRows;
  std::vector<uint8_t> staging(std::min(step, w.rows) * one);
  for (uint32_t row = 0; row < w.rows; row += step) {
    uint32_t n = std::min(step, w.rows - row);
    in.next(staging.data(), n * one);
    pack_rows(w.type, w.rows, w.cols, row, n, staging.data(), out);
  }
}

void load_vector(TensorReader& in, uint32_t cols, DType file_dtype, float* out) {
  in.expect_bytes(row_bytes(file_dtype, cols));
  uint32_t step = static_cast<uint32_t>(kStagingBytes / 4);
  std::vector<uint8_t> staging(row_bytes(file_dtype, std::min(step, cols)));
  for (uint32_t col = 0; col < cols; col += step) {
    uint32_t n = std::min(step, cols - col);
    in.next(staging.data(), row_bytes(file_dtype, n));
    dequantize_row(file_dtype, staging.data(), n, out + col);
  }
}

uint64_t resident_bytes_of(const WeightInfo& w) {
  return w.role == WeightRole::kTable ? 0
                                      : round_up(w.role == WeightRole::kMatrix ? matrix_bytes(w.dtype, w.rows, w.cols)
                                                                               : row_bytes(DType::kF32, w.cols),
                                                 64);
}

}  // namespace

struct Weights::Impl {
  struct Table {
    std::unique_ptr<File> file;
    uint64_t offset = 0, stride = 0;
    bool has_crc = false;
  };

  std::vector<WeightInfo> infos;
  std::vector<uint64_t> offsets;  // in memory; unused for tables
  std::vector<Table> tables;      // by weight index; empty but for tables
  std::vector<uint8_t> is_set;    // not vector<bool>: different weights may be loaded by different threads
  Mapping memory;

  const WeightInfo& info(uint32_t index) const {
    if (index >= infos.size())
      throw Error("weights: index " + str(index) + ", but the program has " + str(infos.size()));
    return infos[index];
  }
  const WeightInfo& info(uint32_t index, WeightRole role) const {
    const WeightInfo& w = info(index);
    if (w.role != role)
      throw Error("weights: index " + str(index) + " has role " + str(static_cast<uint32_t>(w.role)) + ", expected " +
                  str(static_cast<uint32_t>(role)));
    return w;
  }
  uint8_t* data(uint32_t index) const { return memory.data() + offsets[index]; }
};

uint64_t Weights::resident_bytes(const Program& program) {
  uint64_t total = 0;
  for (const WeightInfo& w : program.weights) total += resident_bytes_of(w);
  return round_up(total, kPage);
}

Weights::Weights(const Program& program)
    : impl_(new Impl{program.weights,
                     {},
                     std::vector<Impl::Table>(program.weights.size()),
                     std::vector<uint8_t>(program.weights.size()),
                     Mapping(resident_bytes(program))}) {
  uint64_t at = 0;
  for (const WeightInfo& w : program.weights) {
    impl_->offsets.push_back(at);
    at += resident_bytes_of(w);
  }
  prefer_huge_pages(impl_->memory.data(), impl_->memory.size_bytes());  // loading touches all of it
}

Weights::~Weights() = default;

void Weights::load(uint32_t index, const std::string& tensor, const std::string& file, uint64_t offset, uint64_t nbytes,
                   DType file_dtype, bool packed, bool check_crc, uint32_t crc) {
  const WeightInfo& w = impl_->info(index);
  TensorReader in(file, tensor, offset, nbytes);
  if (w.role == WeightRole::kMatrix) {
    in.expect_type(file_dtype == w.dtype, file_dtype);
    packed ? load_packed(in, matrix(index), impl_->data(index)) : load_rows(in, matrix(index), impl_->data(index));
  } else {
    impl_->info(index, WeightRole::kVector);
    in.expect_type(!is_quantized(file_dtype) && !packed, file_dtype);
    load_vector(in, w.cols, file_dtype, reinterpret_cast<float*>(impl_->data(index)));
  }
  if (check_crc) in.check_crc(crc);
  impl_->is_set[index] = 1;
}

void Weights::set_vector(uint32_t index, const float* data, uint32_t n) {
  const WeightInfo& w = impl_->info(index, WeightRole::kVector);
  if (n != w.cols)
    throw Error("weights: vector " + str(index) + " given " + str(n) + " values, expected " + str(w.cols));
  std::memcpy(impl_->data(index), data, n * sizeof(float));
  impl_->is_set[index] = 1;
}

void Weights::set_table(uint32_t index, const std::string& file, uint64_t offset, uint64_t stride, bool has_crc) {
  const WeightInfo& w = impl_->info(index, WeightRole::kTable);
  auto opened = std::make_unique<File>(file);
  uint64_t one = row_bytes(w.dtype, w.cols) + (has_crc ? 4 : 0);
  if (stride < one || stride > UINT32_MAX)
    throw Error(opened->at("embedding table", offset) + "rows of " + str(one) + " bytes, " + str(stride) + " apart");
  opened->expect_inside("embedding table", offset, stride * (w.rows - 1) + one);
  impl_->tables[index] = Impl::Table{std::move(opened), offset, stride, has_crc};
  impl_->is_set[index] = 1;
}

Matrix Weights::matrix(uint32_t index) const {
  const WeightInfo& w = impl_->info(index, WeightRole::kMatrix);
  return Matrix{w.dtype, w.rows, w.cols, impl_->data(index)};
}

const float* Weights::vector(uint32_t index) const {
  impl_->info(index, WeightRole::kVector);
  return reinterpret_cast<const float*>(impl_->data(index));
}

void Weights::table_row(uint32_t index, uint32_t row, float* out) const {
  const WeightInfo& w = impl_->info(index, WeightRole::kTable);
  const Impl::Table& table = impl_->tables[index];
  uint64_t one = row_bytes(w.dtype, w.cols), offset = table.offset + row * table.stride;
  std::string what = "row " + str(row) + " of the embedding table";
  std::vector<uint8_t> staging(one + (table.has_crc ? 4 : 0));
  table.file->read(what, offset, staging.size(), staging.data());
  if (table.has_crc) {
    uint32_t expected, found = crc32c(0, staging.data(), one);
    std::memcpy(&expected, staging.data() + one, sizeof expected);
    if (found != expected) throw Error(damaged(*table.file, what, offset, expected, found));
  }
  dequantize_row(w.dtype, staging.data(), w.cols, out);
}

void Weights::check_complete() const {
  for (size_t i = 0; i < impl_->is_set.size(); ++i)
    if (!impl_->is_set[i]) throw Error("weights: weight " + str(i) + " of the program was not loaded");
}

}  // namespace headrace
