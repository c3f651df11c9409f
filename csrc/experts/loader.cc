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

void Loader::submit(uint32_t layer, uint32_t expert, uint32_t slot, uint8_t* dst) {
  auto load = std::make_shared<Load>();
  load->layer = layer;
  load->expert = expert;
  load->slot = slot;
  load->dst = dst;
  load->arrived.resize(pieces_[layer].size());
  {
    std::lock_guard lock(mutex_);
    queue_.push_back(std::move(load));
  }
  work_.notify_all();
}

std::vector<Loader::Report> Loader::drop() {
  std::vector<Report> dropped;
  std::lock_guard lock(mutex_);
  for (const auto& load : queue_) {
    load->stop = true;
    if (load->in_flight == 0) dropped.push_back({load->slot, Outcome::kDropped, load->bytes_read, ""});
  }
  queue_.clear();
  return dropped;
}

void Loader::run(uint8_t* staging) {
  std::unique_lock lock(mutex_);
  for (;;) {
    work_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
    if (stopping_) return;

    const std::shared_ptr<Load> load = queue_.front();
    const std::vector<Piece>& pieces = pieces_[load->layer];
    const uint32_t i = load->next++;
    ++load->in_flight;
    if (load->next == pieces.size()) queue_.pop_front();
    lock.unlock();
    uint64_t bytes_read = 0;
    std::string error;
    try {
      read_piece(*load, pieces[i], staging, &bytes_read);
    } catch (const Error& e) {
      error = where(*load) + e.what();
    }
    lock.lock();
    load->bytes_read += bytes_read;
    if (!error.empty()) {
      if (load->error.empty()) load->error = std::move(error);
      load->stop = true;
      queue_.remove(load);
    }
    load->arrived[i] = true;
    check_arrived(*load, lock);
    --load->in_flight;

    const bool complete = load->next == pieces.size();
    if (load->in_flight > 0 || !(complete || load->stop)) continue;
    Report report{load->slot, Outcome::kWhole, load->bytes_read, load->error};
    if (!load->error.empty()) {
      report.outcome = Outcome::kFailed;
    } else if (!complete) {
      report.outcome = Outcome::kDropped;
    }
    lock.unlock();
    landed_(report);
    lock.lock();
  }
}

void Loader::read_piece(const Load& load, const Piece& piece, uint8_t* staging, uint64_t* bytes_read) {
  const LayerExperts& layer = source_.layers[load.layer];
  if (!layer.records.empty()) {
    const ExpertExtent& record = layer.records[load.expert];
    files_.read(record.file, record.offset + piece.offset, piece.nbytes, load.dst + piece.offset, bytes_read);
    return;
  }
  const ExpertPart& part = layer.parts[piece.part];
  const ExpertExtent& extent = layer.rows[load.expert * 3ull + piece.part];
  const uint64_t offset = extent.offset + piece.offset;
  files_.read(extent.file, offset, piece.nbytes, staging, bytes_read);
  uint8_t* dst = load.dst + part_offset(layer, static_cast<int>(piece.part));
  pack_rows(part.type, part.rows, part.cols, piece.row_begin, piece.num_rows, staging + offset % kPage, dst);
  if (piece.row_begin + piece.num_rows == part.rows) {  // so that a slot's bytes are the same from either source
    const uint64_t used = matrix_bytes(part.type, part.rows, part.cols);
    const bool last = piece.part + 1 == layer.parts.size();
    const uint64_t end =
        last ? record_bytes(layer) - part_offset(layer, static_cast<int>(piece.part)) : part_bytes(part);
    std::memset(dst + used, 0, end - used);
  }
}

// Called with the lock, which it gives up while it computes. A load's pieces are all checked when its last thread is
// done.
void Loader::check_arrived(Load& load, std::unique_lock<std::mutex>& lock) {
  const LayerExperts& layer = source_.layers[load.layer];
  if (layer.records.empty()) return;
  const std::vector<Piece>& pieces = pieces_[load.layer];
  while (!load.checking && !load.stop && load.checked < pieces.size() && load.arrived[load.checked]) {
    const Piece& piece = pieces[load.checked];
    load.checking = true;
    lock.unlock();
    const uint32_t crc = crc32c(load.crc, load.dst + piece.offset, piece.nbytes);
    lock.lock();
    load.checking = false;
    load.crc = crc;
    ++load.checked;
  }
  if (load.checked == pieces.size() && load.crc != layer.crc[load.expert]) {
    const ExpertExtent& record = layer.records[load.expert];
    char sums[80];
    std::snprintf(sums, sizeof sums, ": expected CRC-32C 0x%08x, found 0x%08x", layer.crc[load.expert], load.crc);
    load.error = where(load) + source_.files[record.file] + ": record of " + std::to_string(record_bytes(layer)) +
                 " bytes at offset " + std::to_string(record.offset) + sums + "; the store is damaged, pack it again";
  }
}

std::string Loader::where(const Load& load) const {
  return "layer " + std::to_string(load.layer) + " expert " + std::to_string(load.expert) + ": ";
}

}  // namespace headrace
