#include "experts/schedule_bound.h"

#include <algorithm>
#include <string>
#include <utility>

#include "support/error.h"

namespace headrace {

ScheduleBound::ScheduleBound(std::vector<uint64_t> record_bytes, LinkOptions options)
    : record_bytes_(std::move(record_bytes)), options_(std::move(options)) {
  const size_t n = record_bytes_.size();
  const auto require = [](bool holds, const std::string& what) {
    if (!holds) throw Error("schedule bound: expected " + what);
  };
  const auto are_times = [&](const std::vector<double>& times) {
    return times.size() == n && std::all_of(times.begin(), times.end(), [](double t) { return t >= 0 && t < 1e9; });
  };
  require(options_.bytes_per_s > 0, "a link of more than 0 bytes a second");
  require(options_.latency_s >= 0 && options_.latency_s < 1e9, "a latency of at least 0 s");
  require(are_times(options_.before_s) && are_times(options_.after_s), "two times of at least 0 s a layer");
  require(options_.horizon >= 1 && options_.horizon <= 1000, "a horizon of 1 to 1000 passes");
  uint32_t next = 0;
  for (const uint32_t trigger : options_.triggers) {
    require(trigger < n && trigger >= next, "ascending trigger layers below " + std::to_string(n));
    trigger_of_.resize(trigger + 1, trigger);
    next = trigger + 1;
  }
  trigger_of_.resize(n, static_cast<uint32_t>(n));
}

double ScheduleBound::transfer_s(const Work& work, uint32_t layer) const {
  return static_cast<double>(work.num_loads) * static_cast<double>(record_bytes_[layer]) / options_.bytes_per_s;
}

void ScheduleBound::add(uint32_t num_used, uint32_t num_loads) {
  const uint32_t layer = static_cast<uint32_t>(works_.size() % record_bytes_.size());
  Work& work = works_.emplace_back();
  work.num_used = num_used;
  work.num_loads = num_loads;
  link_ += transfer_s(work, layer);
  compute_ += options_.before_s[layer] + options_.after_s[layer];
  if (works_.size() == (options_.horizon + 1) * record_bytes_.size()) run_pass();
}

void ScheduleBound::finish() {
  while (!works_.empty()) run_pass();
}

// The link may begin with the loads of this place.
void ScheduleBound::tell(uint64_t place, uint32_t layer) {
  if (place - first_place_ >= works_.size()) return;
  Work& w = work(place);
  if (w.state != State::kUntold) return;
  w.told_s = now_;
  w.left_s = transfer_s(w, layer);
  w.ready_s = now_;
  w.state = w.num_loads > 0 ? State::kMoving : State::kReady;
  if (w.num_loads > 0) moving_.insert(place);
}

// Time passes; the link moves what is needed first.
void ScheduleBound::move(double seconds) {
  const double end = now_ + seconds;
  while (!moving_.empty() && now_ < end) {
    const uint64_t place = *moving_.begin();
    Work& w = work(place);
    if (w.left_s > end - now_) {
      w.left_s -= end - now_;
      break;
    }
    now_ += w.left_s;
    const uint32_t layer = static_cast<uint32_t>(place % record_bytes_.size());
    w.ready_s = std::max(now_, w.told_s + options_.latency_s + transfer_s(w, layer));
    w.state = State::kReady;
    moving_.erase(moving_.begin());
  }
  now_ = end;
}

void ScheduleBound::run_pass() {
  const uint32_t layers = static_cast<uint32_t>(record_bytes_.size());
  for (uint32_t l = 0; l < layers; ++l) {
    move(options_.before_s[l]);
    tell(first_place_ + l, l);
    for (uint32_t ahead = 1; ahead <= options_.horizon; ++ahead) {
      for (uint32_t told = 0; told <= l; ++told) {
        if (trigger_of_[told] == l) tell(first_place_ + uint64_t{ahead} * layers + told, told);
      }
    }
    Work& w = work(first_place_ + l);
    const double routed = now_;
    // Whatever is needed before this layer has been moved by now, so that nothing delays it.
    if (w.state == State::kMoving) move(w.left_s);
    if (w.state == State::kMoving) {  // the last bit of a sum of times
      moving_.erase(first_place_ + l);
      w.ready_s = std::max(now_, w.told_s + options_.latency_s + transfer_s(w, l));
    }
    double end = routed + options_.after_s[l];
    if (w.num_loads > 0) end = std::max(end, w.ready_s + options_.after_s[l] / w.num_used);
    move(std::max(0.0, end - now_));
  }
  works_.erase(works_.begin(), works_.begin() + layers);
  first_place_ += layers;
}

}  // namespace headrace
