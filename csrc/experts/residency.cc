#include "experts/residency.h"

#include <algorithm>
#include <string>
#include <utility>

#include "support/error.h"

namespace headrace {

Residency::Residency(std::vector<LayerShape> layers, uint64_t capacity_bytes, const PolicyOptions& policy, Evict evict)
    : layers_(std::move(layers)),
      capacity_bytes_(capacity_bytes),
      policy_(make_policy(policy, layers_)),
      evict_(std::move(evict)),
      victims_(0) {
  for (uint32_t l = 0; l < layers_.size(); ++l) {
    first_expert_.push_back(static_cast<uint32_t>(experts_.size()));
    Expert expert;
    expert.layer = l;
    experts_.insert(experts_.end(), layers_[l].num_experts, expert);
    if (layers_[l].num_experts > 0) largest_record_bytes_ = std::max(largest_record_bytes_, layers_[l].record_bytes);
  }
  victims_ = Victims(num_experts());
}

// ---- bytes

void Residency::admit(uint32_t expert) {
  used_bytes_ += record_bytes(expert);
  experts_[expert].state = State::kLoading;
  experts_[expert].was_taken = false;
}

void Residency::make_evictable(uint32_t expert) {
  evictable_bytes_ += record_bytes(expert);
  victims_.put(expert, policy_->key(expert), experts_[expert].is_expected);
}

void Residency::evict(uint32_t expert) {
  if (victims_.contains(expert)) {
    victims_.remove(expert);
    evictable_bytes_ -= record_bytes(expert);
  }
  used_bytes_ -= record_bytes(expert);
  Expert& e = experts_[expert];
  e.state = State::kAbsent;
  e.entry = kNone;
  e.is_expected = false;
  ++counters_.evictions;
  evict_(expert, e.was_taken);
}

void Residency::rekey() {
  for (const uint32_t e : changed_) {
    if (victims_.contains(e)) victims_.put(e, policy_->key(e), experts_[e].is_expected);
  }
  changed_.clear();
}

// ---- the layer in progress

void Residency::observe(uint32_t layer, std::span<const uint32_t> ids) {
  scratch_.clear();
  for (const uint32_t id : ids) scratch_.push_back(first_expert_[layer] + id);
  policy_->observe(layer, scratch_, changed_);
  const uint32_t end = counters_.prefetches > 0 ? first_expert_[layer] + layers_[layer].num_experts : 0;
  for (uint32_t e = first_expert_[layer]; e < end; ++e) {
    if (!experts_[e].is_expected) continue;  // what was guessed for this pass has come or will not
    experts_[e].is_expected = false;
    changed_.push_back(e);
  }
  rekey();
}

void Residency::pin(uint32_t expert, uint32_t index) {
  Expert& e = experts_[expert];
  e.entry = index;
  if (e.state == State::kLoading) {
    ++counters_.late_hits;
    ++num_loading_;
    prefetch_bytes_ -= record_bytes(expert);
    entries_[index].status = Status::kLoading;
    return;
  }
  ++counters_.hits;
  victims_.remove(expert);
  evictable_bytes_ -= record_bytes(expert);
  entries_[index].status = Status::kReady;
}

void Residency::begin(uint32_t layer, std::span<const uint32_t> ids, std::span<const uint32_t> num_routes) {
  active_ = true;
  layer_ = layer;
  entries_.clear();
  queue_.clear();
  passed_.clear();
  num_loading_ = 0;
  for (uint32_t i = 0; i < ids.size(); ++i) {
    const uint32_t expert = first_expert_[layer] + ids[i];
    entries_.push_back({expert, Status::kQueued});
    policy_->use(expert, num_routes.empty() ? 1 : num_routes[i]);
    if (experts_[expert].state != State::kAbsent) pin(expert, i);
  }
  for (uint32_t i = static_cast<uint32_t>(ids.size()); i-- > 0;) {
    if (entries_[i].status == Status::kQueued) queue_.push_back(i);
  }
  counters_.loads += queue_.size();
  const uint64_t record = layers_[layer].record_bytes;
  const uint64_t room = record == 0 ? ids.size() : (capacity_bytes_ - prefetch_bytes_) / record;
  num_passing_ = static_cast<uint32_t>(ids.size() - std::min<uint64_t>(ids.size(), room));
  // Nothing before the first load will give a slot up: hits hold them all.
  if (!queue_.empty() && queue_.back() == 0 && used_bytes_ - evictable_bytes_ + record > capacity_bytes_) {
    give_up_furthest_hit();
  }
}

void Residency::give_up_furthest_hit() {
  const uint32_t head = queue_.back();
  for (uint32_t i = static_cast<uint32_t>(entries_.size()); i-- > head + 1;) {
    if (entries_[i].status != Status::kReady) continue;
    evict(entries_[i].expert);
    entries_[i].status = Status::kQueued;
    queue_.insert(std::upper_bound(queue_.begin(), queue_.end(), i, std::greater<>()), i);
    --counters_.hits;
    ++counters_.loads;
    return;
  }
}

uint32_t Residency::next_load() {
  if (queue_.empty()) return kNone;
  const uint64_t record = layers_[layer_].record_bytes;
  if (used_bytes_ - evictable_bytes_ + record <= capacity_bytes_) {
    while (!fits(record)) evict(victims_.first());
  } else if (!passed_.empty()) {
    std::pop_heap(passed_.begin(), passed_.end(), std::greater<>());
    evict(entries_[passed_.back()].expert);
    passed_.pop_back();
  } else {
    return kNone;
  }
  const uint32_t index = queue_.back();
  queue_.pop_back();
  admit(entries_[index].expert);
  experts_[entries_[index].expert].entry = index;
  entries_[index].status = Status::kLoading;
  ++num_loading_;
  return index;
}

void Residency::take(uint32_t index) {
  entries_[index].status = Status::kTaken;
  experts_[entries_[index].expert].was_taken = true;
}

void Residency::release(uint32_t index) {
  entries_[index].status = Status::kReleased;
  if (index >= num_passing_) return;
  passed_.push_back(index);
  std::push_heap(passed_.begin(), passed_.end(), std::greater<>());
}

bool Residency::make_room_in_layer() {
  if (queue_.empty()) return false;
  for (const Entry& entry : entries_) {
    if (entry.status != Status::kReleased || experts_[entry.expert].state != State::kResident) continue;
    evict(entry.expert);
    return true;
  }
  const uint64_t hits = counters_.hits;
  give_up_furthest_hit();
  return counters_.hits < hits;
}

void Residency::end() {
  queue_.clear();
  for (const Entry& entry : entries_) {
    if (experts_[entry.expert].entry == kNone) continue;
    experts_[entry.expert].entry = kNone;
    make_evictable(entry.expert);
  }
  for (const uint32_t expert : landed_) make_evictable(expert);
  landed_.clear();
  entries_.clear();
  active_ = false;
}

// ---- loads and prefetches on their way

void Residency::landed(uint32_t expert) {
  Expert& e = experts_[expert];
  e.state = State::kResident;
  if (e.entry != kNone) {
    entries_[e.entry].status = Status::kReady;
    --num_loading_;
    return;
  }
  prefetch_bytes_ -= record_bytes(expert);
  if (active_) {
    landed_.push_back(expert);  // what may be evicted during a layer does not depend on when reads end
  } else {
    make_evictable(expert);
  }
}

void Residency::failed(uint32_t expert) {
  Expert& e = experts_[expert];
  e.state = State::kAbsent;
  e.is_expected = false;
  used_bytes_ -= record_bytes(expert);
  if (e.entry == kNone) {
    prefetch_bytes_ -= record_bytes(expert);
    return;
  }
  entries_[e.entry].status = Status::kFailed;
  e.entry = kNone;
  --num_loading_;
}

bool Residency::prefetch(uint32_t expert, const std::function<bool(uint32_t)>& is_protected) {
  if (experts_[expert].state != State::kAbsent || !queue_.empty()) return false;
  const uint64_t record = record_bytes(expert);
  // Any layer must find room for one load of its own beside what is on its way.
  if (prefetch_bytes_ + record + largest_record_bytes_ > capacity_bytes_) return false;
  if (used_bytes_ - evictable_bytes_ + record > capacity_bytes_) return false;
  scratch_.clear();  // victims, those chosen and those passed over
  std::vector<uint32_t> chosen;
  uint64_t freed = 0;
  while (used_bytes_ - freed + record > capacity_bytes_ && !victims_.empty() && !victims_.is_spared(victims_.first())) {
    const uint32_t victim = victims_.first();
    victims_.remove(victim);
    if (is_protected && is_protected(victim)) {
      scratch_.push_back(victim);
      continue;
    }
    chosen.push_back(victim);
    freed += record_bytes(victim);
  }
  const bool fits = used_bytes_ - freed + record <= capacity_bytes_;
  for (const uint32_t e : scratch_) victims_.put(e, policy_->key(e), false);
  for (const uint32_t e : chosen) victims_.put(e, policy_->key(e), false);
  if (!fits) return false;
  for (const uint32_t e : chosen) evict(e);
  admit(expert);
  experts_[expert].is_expected = true;
  prefetch_bytes_ += record;
  ++counters_.prefetches;
  return true;
}

void Residency::expect(uint32_t layer, std::span<const uint32_t> ids) {
  scratch_.clear();
  for (const uint32_t id : ids) scratch_.push_back(first_expert_[layer] + id);
  policy_->expect(layer, scratch_, changed_);
  rekey();
}

void Residency::resize(uint64_t capacity_bytes) {
  capacity_bytes_ = capacity_bytes;
  while (used_bytes_ > capacity_bytes_ && !victims_.empty()) evict(victims_.first());
}

uint64_t Residency::overhead_bytes(const std::vector<LayerShape>& layers, const PolicyOptions& policy) {
  uint64_t experts = 0;
  for (const LayerShape& layer : layers) experts += layer.num_experts;
  // An expert's row here, in Victims, and in the layer in progress.
  const uint64_t row = sizeof(Expert) + 32 + 4 + 4 + sizeof(Entry) + 8;
  return experts * row + layers.size() * sizeof(LayerShape) + policy_bytes(policy, layers);
}

}  // namespace headrace
