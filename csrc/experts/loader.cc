#include "experts/loader.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <system_error>
#include <utility>

#include "kernels/kernels.h"
#include "support/error.h"

namespace headrace {

std::vector<Piece> cut_record(const LayerExperts& layer) {
  std::vector<Piece> pieces;
  if (layer.num_experts == 0) return pieces;
  if (!layer.records.empty()) {
    const uint64_t record = record_bytes(layer);
    for (uint64_t offset = 0; offset < record; offset += kPieceBytes) {
      pieces.push_back({0, 0, 0, offset, std::min(kPieceBytes, record - offset)});
    }
    return pieces;
  }
  for (uint32_t p = 0; p < layer.parts.size(); ++p) {
    const ExpertPart& part = layer.parts[p];
    const uint64_t tiles = std::max<uint64_t>(1, kPieceBytes / tile_bytes(part.type, part.cols));
    const uint64_t rows_at_once = tiles * kTileRows;
    for (uint64_t row = 0; row < part.rows; row += rows_at_once) {
      const uint64_t rows = std::min(rows_at_once, part.rows - row);
      const uint64_t bytes = row_bytes(part.type, part.cols);
      pieces.push_back({p, static_cast<uint32_t>(row), static_cast<uint32_t>(rows), row * bytes, rows * bytes});
    }
  }
  return pieces;
}

uint64_t read_bytes(const LayerExperts& layer, uint32_t expert, const std::vector<uint64_t>& file_bytes) {
  uint64_t total = 0;
  for (const Piece& piece : cut_record(layer)) {
    const ExpertExtent& extent = layer.records.empty() ? layer.rows[expert * 3ull + piece.part] : layer.records[expert];
    const uint64_t begin = extent.offset + piece.offset, end = round_up(begin + piece.nbytes, kPage);
    const uint64_t beyond_file = end - std::min(end, file_bytes[extent.file]);
    total += SourceFiles::window_bytes(begin, piece.nbytes) - beyond_file;
  }
  return total;
}

uint64_t staging_bytes(const ExpertSource& source) {
  uint64_t most = 0;
  for (const LayerExperts& layer : source.layers) {
    if (layer.rows.empty()) continue;
    for (const Piece& piece : cut_record(layer)) most = std::max(most, piece.nbytes);
  }
  return most == 0 ? 0 : round_up(most, kPage) + kPage;  // the window reaches over both ends
}

void Loader::Free::operator()(uint8_t* p) const { std::free(p); }

Loader::Loader(const ExpertSource& source, SourceFiles& files, uint32_t num_threads,
               std::function<void(const Report&)> landed)
    : source_(source), files_(files), landed_(std::move(landed)) {
  for (const LayerExperts& layer : source.layers) pieces_.push_back(cut_record(layer));
  const uint64_t staging = staging_bytes(source);
  for (uint32_t t = 0; t < num_threads; ++t) {
    staging_.emplace_back(staging ? static_cast<uint8_t*>(std::aligned_alloc(kPage, staging)) : nullptr);
    if (staging && !staging_.back()) throw Error("expert loader: no memory for " + std::to_string(staging) + " bytes");
    if (staging) std::memset(staging_.back().get(), 0, staging);  // committed now, not in the middle of a pass
  }
  try {
    for (uint32_t t = 0; t < num_threads; ++t) threads_.emplace_back([this, t] { run(staging_[t].get()); });
  } catch (const std::system_error& e) {
    stop_and_join();
    throw Error(std::string("expert loader: cannot start a thread: ") + e.what());
  }
}

Loader::~Loader() { stop_and_join(); }

void Loader::stop_and_join() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  work_.notify_all();
  for (std::thread& t : threads_) t.join();
}

void Loader::submit(Request request) {
  auto read = std::make_shared<Read>();
  read->layer = request.layer;
  read->is_urgent = request.is_urgent;
  read->max_threads = request.max_threads;
  for (const Target& target : request.targets) {
    Job job;
    static_cast<Target&>(job) = target;
    job.arrived.resize(pieces_[request.layer].size());
    read->targets.push_back(std::move(job));
  }
  {
    std::lock_guard lock(mutex_);
    reads_.push_back(std::move(read));
  }
  work_.notify_all();
}

// Whether a piece is left to hand out: moves past experts that were dropped.
bool Loader::has_pieces(Read& read) {
  while (read.target < read.targets.size() &&
         (read.targets[read.target].dropped || read.piece == pieces_[read.layer].size())) {
    ++read.target;
    read.piece = 0;
  }
  return read.target < read.targets.size() && read.error.empty();
}

std::shared_ptr<Loader::Read> Loader::next_read() {
  for (const bool is_urgent : {true, false}) {
    for (const auto& read : reads_) {
      if (read->is_urgent == is_urgent && read->in_flight < read->max_threads && has_pieces(*read)) return read;
    }
  }
  return nullptr;
}

Loader::Report Loader::report(const Read& read) const {
  Report report;
  report.error = read.error;
  for (const Job& job : read.targets) {
    const Outcome outcome = job.dropped ? Outcome::kDropped : read.error.empty() ? Outcome::kWhole : Outcome::kFailed;
    report.items.push_back({job.slot, outcome, job.bytes_read});
  }
  return report;
}

std::vector<Loader::Report> Loader::drop(const std::function<bool(uint32_t)>& is_meant) {
  std::vector<Report> over;
  std::lock_guard lock(mutex_);
  for (auto at = reads_.begin(); at != reads_.end();) {
    Read& read = **at;
    has_pieces(read);  // from read.target on there are pieces to drop
    for (size_t i = read.target; i < read.targets.size(); ++i) {
      Job& job = read.targets[i];
      job.dropped = job.dropped || is_meant(job.slot);
    }
    const bool is_over = read.in_flight == 0 && !has_pieces(read);
    if (is_over) over.push_back(report(read));
    at = is_over ? reads_.erase(at) : std::next(at);
  }
  return over;
}

std::optional<Loader::Report> Loader::cancel(uint32_t slot) {
  std::vector<Report> over = drop([slot](uint32_t s) { return s == slot; });
  if (over.empty()) return std::nullopt;
  return std::move(over.front());
}

void Loader::promote(uint32_t slot) {
  std::lock_guard lock(mutex_);
  for (const auto& read : reads_) {
    for (const Job& job : read->targets) read->is_urgent = read->is_urgent || job.slot == slot;
  }
}

void Loader::run(uint8_t* staging) {
  std::unique_lock lock(mutex_);
  for (;;) {
    std::shared_ptr<Read> read;
    work_.wait(lock, [&] { return stopping_ || (read = next_read()) != nullptr; });
    if (stopping_) return;

    Job& job = read->targets[read->target];
    const uint32_t i = read->piece++;
    const Piece& piece = pieces_[read->layer][i];
    ++read->in_flight;
    lock.unlock();
    uint64_t bytes_read = 0;
    std::string error;
    try {
      read_piece(*read, job, piece, staging, &bytes_read);
    } catch (const Error& e) {
      error = where(*read, job) + e.what();
    }
    lock.lock();
    job.bytes_read += bytes_read;
    if (read->error.empty()) read->error = std::move(error);
    job.arrived[i] = true;
    check_arrived(*read, job, lock);
    --read->in_flight;

    if (has_pieces(*read)) work_.notify_one();  // it may go on, and this thread may take another
    if (read->in_flight > 0 || has_pieces(*read)) continue;
    reads_.remove(read);
    const Report done = report(*read);
    lock.unlock();
    landed_(done);
    lock.lock();
  }
}

void Loader::read_piece(const Read& read, const Job& job, const Piece& piece, uint8_t* staging, uint64_t* bytes_read) {
  const LayerExperts& layer = source_.layers[read.layer];
  if (!layer.records.empty()) {
    const ExpertExtent& record = layer.records[job.expert];
    files_.read(record.file, record.offset + piece.offset, piece.nbytes, job.dst + piece.offset, bytes_read);
    return;
  }
  const ExpertPart& part = layer.parts[piece.part];
  const ExpertExtent& extent = layer.rows[job.expert * 3ull + piece.part];
  const uint64_t offset = extent.offset + piece.offset;
  files_.read(extent.file, offset, piece.nbytes, staging, bytes_read);
  uint8_t* dst = job.dst + part_offset(layer, static_cast<int>(piece.part));
  pack_rows(part.type, part.rows, part.cols, piece.row_begin, piece.num_rows, staging + offset % kPage, dst);
  if (piece.row_begin + piece.num_rows == part.rows) {  // so that a slot's bytes are the same from either source
    const uint64_t used = matrix_bytes(part.type, part.rows, part.cols);
    const bool last = piece.part + 1 == layer.parts.size();
    const uint64_t end =
        last ? record_bytes(layer) - part_offset(layer, static_cast<int>(piece.part)) : part_bytes(part);
    std::memset(dst + used, 0, end - used);
  }
}

// Called with the lock, which it gives up while it computes. An expert's pieces are all checked when its last thread is
// done.
void Loader::check_arrived(Read& read, Job& job, std::unique_lock<std::mutex>& lock) {
  const LayerExperts& layer = source_.layers[read.layer];
  if (layer.records.empty()) return;
  const std::vector<Piece>& pieces = pieces_[read.layer];
  while (!job.checking && !job.dropped && read.error.empty() && job.checked < pieces.size() &&
         job.arrived[job.checked]) {
    const Piece& piece = pieces[job.checked];
    job.checking = true;
    lock.unlock();
    const uint32_t crc = crc32c(job.crc, job.dst + piece.offset, piece.nbytes);
    lock.lock();
    job.checking = false;
    job.crc = crc;
    ++job.checked;
    if (job.checked < pieces.size() || job.crc == layer.crc[job.expert]) continue;
    const ExpertExtent& record = layer.records[job.expert];
    char sums[80];
    std::snprintf(sums, sizeof sums, ": expected CRC-32C 0x%08x, found 0x%08x", layer.crc[job.expert], job.crc);
    read.error = where(read, job) + source_.files[record.file] + ": record of " + std::to_string(record_bytes(layer)) +
                 " bytes at offset " + std::to_string(record.offset) + sums + "; the store is damaged, pack it again";
  }
}

std::string Loader::where(const Read& read, const Job& job) const {
  return "layer " + std::to_string(read.layer) + " expert " + std::to_string(job.expert) + ": ";
}

}  // namespace headrace
