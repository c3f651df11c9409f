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
      victims_(0),
      banks_(layers_) {
  for (uint32_t l = 0; l < layers_.size(); ++l) {
    first_expert_.push_back(static_cast<uint32_t>(experts_.size()));
    Expert expert;
    expert.layer = l;
    experts_.insert(experts_.end(), layers_[l].num_experts, expert);
    if (layers_[l].num_experts > 0) largest_record_bytes_ = std::max(largest_record_bytes_, layers_[l].record_bytes);
  }
  victims_ = Victims(num_experts());
  prompt_routes_.resize(num_experts(), 0);
}

// ---- bytes

void Residency::admit(uint32_t expert) {
  used_bytes_ += record_bytes(expert);
  experts_[expert].state = State::kLoading;
  experts_[expert].was_taken = false;
}

void Residency::make_evictable(uint32_t expert) {
  evictable_bytes_ += record_bytes(expert);
  rank(expert);
}

void Residency::unlist(uint32_t expert) {
  if (!victims_.contains(expert)) return;
  victims_.remove(expert);
  evictable_bytes_ -= record_bytes(expert);
}

// Among the victims. While a pass is streamed, what it has yet to visit goes last, the furthest layer of it first; of
// the others those go first that the prompt routed to least.
void Residency::rank(uint32_t expert) {
  const Expert& e = experts_[expert];
  if (!streaming_) {
    victims_.put(expert, policy_->key(expert), e.is_expected);
  } else if (e.layer < num_layers_begun_) {
    victims_.put(expert, {prompt_routes_[expert], 0}, false);
  } else {
    victims_.put(expert, {layers_.size() - e.layer, prompt_routes_[expert]}, true);
  }
}

void Residency::evict(uint32_t expert) {
  unlist(expert);
  banks_.let_go(expert);
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
    if (victims_.contains(e)) rank(e);
  }
  changed_.clear();
}

// Evicts victims until so many bytes are free, or nothing if that cannot be. choose(victim) says whether it may go.
template <class Choose>
bool Residency::make_room(uint64_t bytes, Choose choose) {
  if (used_bytes_ - evictable_bytes_ + bytes > capacity_bytes_) return false;
  std::vector<uint32_t> going, staying;
  uint64_t freed = 0;
  while (used_bytes_ - freed + bytes > capacity_bytes_ && !victims_.empty()) {
    const uint32_t victim = victims_.first();
    const Choice choice = choose(victim);
    if (choice == Choice::kEnds) break;
    victims_.remove(victim);
    (choice == Choice::kGoes ? going : staying).push_back(victim);
    if (choice == Choice::kGoes) freed += record_bytes(victim);
  }
  const bool fits = used_bytes_ - freed + bytes <= capacity_bytes_;
  for (const uint32_t e : staying) rank(e);
  for (const uint32_t e : going) rank(e);
  if (!fits) return false;
  for (const uint32_t e : going) evict(e);
  return true;
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
    entries_[index].was_late = true;
    return;
  }
  ++counters_.hits;
  unlist(expert);
  entries_[index].status = Status::kReady;
}

void Residency::begin(uint32_t layer, std::span<const uint32_t> ids, std::span<const uint32_t> num_routes) {
  active_ = true;
  layer_ = layer;
  entries_.clear();
  queue_.clear();
  passed_.clear();
  unwanted_.clear();
  num_loading_ = 0;
  for (uint32_t i = 0; i < ids.size(); ++i) {
    const uint32_t expert = first_expert_[layer] + ids[i];
    entries_.push_back({expert});
    policy_->use(expert, num_routes.empty() ? 1 : num_routes[i]);
    if (streaming_) prompt_routes_[expert] += num_routes.empty() ? 1 : num_routes[i];
    if (experts_[expert].state != State::kAbsent) pin(expert, i);
  }
  for (uint32_t i = static_cast<uint32_t>(ids.size()); i-- > 0;) {
    if (entries_[i].status == Status::kQueued) queue_.push_back(i);
  }
  counters_.loads += queue_.size();
  num_passing_ = 0;
  if (streaming_) return settle_unrouted(layer);
  const uint64_t record = layers_[layer].record_bytes;
  const uint64_t room = record == 0 ? ids.size() : (capacity_bytes_ - prefetch_bytes_) / record;
  num_passing_ = static_cast<uint32_t>(ids.size() - std::min<uint64_t>(ids.size(), room));
  // Nothing before the first load will give a slot up: hits hold them all.
  if (!queue_.empty() && queue_.back() == 0 && used_bytes_ - evictable_bytes_ + record > capacity_bytes_) {
    give_up_furthest_hit();
  }
}

bool Residency::give_up_furthest_hit() {
  const uint32_t head = queue_.back();
  for (uint32_t i = static_cast<uint32_t>(entries_.size()); i-- > head + 1;) {
    if (entries_[i].status != Status::kReady) continue;
    evict(entries_[i].expert);
    --(entries_[i].was_late ? counters_.late_hits : counters_.hits);
    ++counters_.loads;
    entries_[i] = {entries_[i].expert};
    queue_.insert(std::upper_bound(queue_.begin(), queue_.end(), i, std::greater<>()), i);
    return true;
  }
  return false;
}

void Residency::start(uint32_t index) {
  admit(entries_[index].expert);
  experts_[entries_[index].expert].entry = index;
  entries_[index].status = Status::kLoading;
  ++num_loading_;
}

uint32_t Residency::next_load() {
  if (queue_.empty() || streaming_) return kNone;
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
  start(index);
  return index;
}

void Residency::take(uint32_t index) {
  entries_[index].status = Status::kTaken;
  experts_[entries_[index].expert].was_taken = true;
}

void Residency::release(uint32_t index) {
  entries_[index].status = Status::kReleased;
  if (streaming_) {  // its room is free for whoever comes, its bank too
    const uint32_t expert = entries_[index].expert;
    experts_[expert].entry = kNone;
    banks_.let_go(expert);
    make_evictable(expert);
    return;
  }
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
  return give_up_furthest_hit();
}

void Residency::end() {
  queue_.clear();
  for (const Entry& entry : entries_) {
    if (experts_[entry.expert].entry == kNone) continue;
    experts_[entry.expert].entry = kNone;
    banks_.let_go(entry.expert);
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
  if (streaming_) return;  // its bank keeps it until its layer comes
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
  e.is_unwanted = false;
  banks_.let_go(expert);
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
  if (streaming_ || experts_[expert].state != State::kAbsent || !queue_.empty()) return false;
  const uint64_t record = record_bytes(expert);
  // Any layer must find room for one load of its own beside what is on its way.
  if (prefetch_bytes_ + record + largest_record_bytes_ > capacity_bytes_) return false;
  const auto choose = [&](uint32_t victim) {
    if (victims_.is_spared(victim)) return Choice::kEnds;
    return is_protected && is_protected(victim) ? Choice::kStays : Choice::kGoes;
  };
  if (!make_room(record, choose)) return false;
  admit(expert);
  experts_[expert].is_expected = true;
  prefetch_bytes_ += record;
  ++counters_.prefetches;
  return true;
}

// ---- a prompt's pass, streamed

void Residency::begin_stream(const StreamOptions& options, std::vector<bool> may_read_early, bool is_first) {
  streaming_ = true;
  stream_ = options;
  may_read_early_ = std::move(may_read_early);
  may_read_early_.resize(layers_.size(), false);
  banks_.reset(options.group_size, options.banks);
  if (is_first) prompt_routes_.assign(num_experts(), 0);
  num_groups_in_flight_ = num_layers_begun_ = early_layer_ = early_id_ = 0;
  for (uint32_t e = 0; e < num_experts(); ++e) {
    experts_[e].is_expected = false;
    if (victims_.contains(e)) rank(e);
  }
}

// What stays counts as used once more, those last that the prompt routed to most: what decode is likely to need is not
// what happened to come last.
void Residency::end_stream() {
  streaming_ = false;
  std::vector<uint32_t> staying;
  for (uint32_t e = 0; e < num_experts(); ++e) {
    if (experts_[e].state == State::kResident) staying.push_back(e);
  }
  std::stable_sort(staying.begin(), staying.end(),
                   [&](uint32_t a, uint32_t b) { return prompt_routes_[a] < prompt_routes_[b]; });
  for (const uint32_t e : staying) policy_->touch(e);
  for (const uint32_t e : staying) {
    banks_.let_go(e);
    victims_.contains(e) ? rank(e) : make_evictable(e);
  }
}

// The routes of the layer are known: of what it did not ask for, what is here may go, what is on its way is dropped. So
// for layers that the pass went by.
void Residency::settle_unrouted(uint32_t layer) {
  const uint32_t begin = first_expert_[std::min(num_layers_begun_, layer)];
  const uint32_t end = first_expert_[layer] + layers_[layer].num_experts;
  num_layers_begun_ = std::max(num_layers_begun_, layer + 1);
  if (early_layer_ <= layer) {
    early_layer_ = layer + 1;
    early_id_ = 0;
  }
  for (uint32_t expert = begin; expert < end; ++expert) {
    Expert& e = experts_[expert];
    if (e.entry != kNone || e.state == State::kAbsent) continue;
    if (e.state == State::kLoading) {
      e.is_unwanted = true;
      unwanted_.push_back(expert);
    } else if (victims_.contains(expert)) {
      rank(expert);
    } else {
      banks_.let_go(expert);
      make_evictable(expert);
    }
  }
}

void Residency::next_group(std::vector<uint32_t>& experts) {
  experts.clear();
  if (!streaming_ || num_groups_in_flight_ >= stream_.queue_depth) return;
  if (!queue_.empty()) {
    next_routed_group(experts);
  } else if (stream_.reads_early) {
    next_early_group(experts);
  }
  if (!experts.empty()) ++num_groups_in_flight_;
}

// Whether nothing that comes before it in the layer is still to be used: the executor can only wait for this one.
bool Residency::is_waited_for(uint32_t index) const {
  return std::all_of(entries_.begin(), entries_.begin() + index,
                     [](const Entry& entry) { return entry.status == Status::kReleased; });
}

// A bank's worth of early reads that is here gives its room up: of the layer that is furthest ahead.
bool Residency::give_up_furthest_guess() {
  for (uint32_t e = num_experts(); e-- > first_expert_[layer_] + layers_[layer_].num_experts;) {
    if (experts_[e].state != State::kResident || victims_.contains(e)) continue;
    evict(e);
    return true;
  }
  return false;
}

void Residency::next_routed_group(std::vector<uint32_t>& experts) {
  const uint32_t head = queue_.back(), group = banks_.group(entries_[head].expert);
  const uint64_t record = layers_[layer_].record_bytes;
  const auto any = [](uint32_t) { return Choice::kGoes; };
  uint32_t n = 0;
  while (n < queue_.size() && banks_.group(entries_[queue_[queue_.size() - 1 - n]].expert) == group) ++n;
  n = static_cast<uint32_t>(std::min<uint64_t>(n, capacity_bytes_ / record));
  if (!banks_.has_room_for(group) || !make_room(n * record, any)) {
    // What holds the room comes after it, which happens only when an early read failed or hits fill the arena.
    if (!is_waited_for(head)) return;
    while (used_bytes_ - evictable_bytes_ + record > capacity_bytes_) {
      if (!give_up_furthest_hit() && !give_up_furthest_guess()) return;
    }
    while (!make_room(n * record, any)) --n;
  }
  for (; n > 0; --n) {
    const uint32_t index = queue_.back();
    queue_.pop_back();
    start(index);
    banks_.hold(entries_[index].expert);
    experts.push_back(entries_[index].expert);
  }
}

void Residency::next_early_group(std::vector<uint32_t>& experts) {
  for (; early_layer_ < layers_.size() && may_read_early_[early_layer_]; ++early_layer_, early_id_ = 0) {
    const LayerShape& layer = layers_[early_layer_];
    const uint32_t first = first_expert_[early_layer_];
    while (early_id_ < layer.num_experts) {
      const uint32_t group = banks_.group(first + early_id_);
      const uint32_t end = std::min(group + stream_.group_size, first + layer.num_experts);
      for (uint32_t e = group; e < end; ++e) {
        if (experts_[e].state == State::kAbsent) experts.push_back(e);
      }
      if (experts.empty()) {
        early_id_ = end - first;
        continue;
      }
      const auto choose = [&](uint32_t victim) {
        // What this pass needs no later than the group makes no room for it.
        const uint32_t its = experts_[victim].layer;
        return its < num_layers_begun_ || its > early_layer_ ? Choice::kGoes : Choice::kEnds;
      };
      if (!banks_.has_room_for(group) || !make_room(experts.size() * layer.record_bytes, choose)) {
        experts.clear();
        return;
      }
      early_id_ = end - first;
      for (const uint32_t e : experts) {
        admit(e);
        banks_.hold(e);
        prefetch_bytes_ += layer.record_bytes;
      }
      counters_.prefetches += experts.size();
      return;
    }
  }
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
  const uint64_t row = sizeof(Expert) + 32 + 4 + 4 + sizeof(Entry) + 8 + 8 + 8 + 4 + 1;
  return experts * row + layers.size() * sizeof(LayerShape) + policy_bytes(policy, layers);
}

}  // namespace headrace
