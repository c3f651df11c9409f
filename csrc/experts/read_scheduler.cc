#include "experts/read_scheduler.h"

#include <utility>

namespace headrace {

ReadScheduler::ReadScheduler(std::vector<LayerShape> layers, uint64_t capacity_bytes, const PolicyOptions& policy,
                             Residency::Evict evict, uint32_t max_prefetches)
    : layers_(std::move(layers)),
      max_prefetches_(max_prefetches),
      residency_(layers_, capacity_bytes, policy, std::move(evict)),
      prefetcher_(static_cast<uint32_t>(layers_.size()), residency_.num_experts()) {}

void ReadScheduler::begin_stream(const StreamOptions& options, const std::vector<bool>& may_read_early, bool is_first) {
  std::vector<uint32_t> words = {options.group_size, options.queue_depth, options.banks, options.reads_early};
  for (uint32_t l = 0; l < layers_.size(); ++l) words.push_back(l < may_read_early.size() && may_read_early[l]);
  log_.add(ReadEvent::kBeginStream, is_first, words);
  residency_.begin_stream(options, may_read_early, is_first);
}

void ReadScheduler::end_stream() {
  log_.add(ReadEvent::kEndStream, 0);
  residency_.end_stream();
}

void ReadScheduler::begin(uint32_t layer, std::span<const uint32_t> ids, std::span<const uint32_t> num_routes) {
  log_.add(ReadEvent::kBegin, layer);
  last_layer_ = layer;
  residency_.begin(layer, ids, num_routes);
}

void ReadScheduler::release(uint32_t index) {
  log_.add(ReadEvent::kRelease, index);
  residency_.release(index);
}

void ReadScheduler::end() {
  log_.add(ReadEvent::kEnd, 0);
  residency_.end();
}

ReadScheduler::Read ReadScheduler::finish(uint32_t first_expert) {
  const auto at = in_flight_.find(first_expert);
  Read read = std::move(at->second);
  in_flight_.erase(at);
  if (read.is_group) residency_.end_group();
  if (read.is_guess && !read.is_group) --num_prefetches_;
  return read;
}

void ReadScheduler::landed(uint32_t first_expert, std::span<const uint32_t> bytes_read, std::vector<uint32_t>& gone) {
  const Read read = finish(first_expert);
  std::vector<uint32_t> words;
  gone.clear();
  for (size_t i = 0; i < read.experts.size(); ++i) {
    const uint32_t expert = read.experts[i];
    if (residency_.is_unwanted(expert)) {
      words.push_back(bytes_read[i]);
      gone.push_back(expert);
      residency_.failed(expert);
    } else {
      residency_.landed(expert);
    }
  }
  log_.add(ReadEvent::kLanded, first_expert, words);
}

void ReadScheduler::failed(uint32_t first_expert, std::span<const uint32_t> bytes_read, std::vector<uint32_t>& gone) {
  gone = finish(first_expert).experts;
  for (const uint32_t expert : gone) residency_.failed(expert);
  log_.add(ReadEvent::kFailed, first_expert, bytes_read);
}

void ReadScheduler::forecast(uint32_t layer, std::vector<uint32_t> experts) {
  std::vector<uint32_t> words = {static_cast<uint32_t>(experts.size())};
  words.insert(words.end(), experts.begin(), experts.end());
  log_.add(ReadEvent::kForecast, layer, words);
  prefetcher_.forecast(layer, std::move(experts));
}

void ReadScheduler::resize(uint64_t capacity_bytes) {
  const uint32_t words[] = {static_cast<uint32_t>(capacity_bytes), static_cast<uint32_t>(capacity_bytes >> 32)};
  log_.add(ReadEvent::kResize, 0, words);
  residency_.resize(capacity_bytes);
}

void ReadScheduler::hold(bool is_held) {
  if (is_held != is_held_) log_.add(ReadEvent::kHold, is_held);
  is_held_ = is_held;
}

bool ReadScheduler::next(Read& read, bool may_guess) {
  read = {};
  if (is_held_) return false;
  const uint32_t index = residency_.next_load();
  if (index != Residency::kNone) {
    read.experts = {residency_.entries()[index].expert};
  } else {
    residency_.next_group(read.experts);
    read.is_group = !read.experts.empty();
    if (read.is_group) read.is_guess = residency_.entry_of(read.experts[0]) == Residency::kNone;
  }
  if (read.experts.empty() && may_guess && num_prefetches_ < max_prefetches_) {
    const uint32_t expert = prefetcher_.start(residency_, last_layer_);
    if (expert != Residency::kNone) {
      read.experts = {expert};
      read.is_guess = true;
      ++num_prefetches_;
    }
  }
  if (read.experts.empty()) return false;
  in_flight_[read.experts[0]] = read;
  return true;
}

}  // namespace headrace
