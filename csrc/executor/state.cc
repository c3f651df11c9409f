#include "executor/state.h"

#include <string>
#include <vector>

#include "executor/mapping.h"
#include "experts/expert_source.h"
#include "support/error.h"

namespace headrace {

namespace {

constexpr uint32_t kMaxCapacity = 1u << 28;

uint64_t key_bytes(const StateInfo& s, uint32_t capacity, DType kv_type) {  // of one head
  return matrix_bytes(kv_type, capacity, s.head_dim);
}

uint64_t value_bytes(const StateInfo& s, uint32_t capacity, DType kv_type) {
  return row_bytes(kv_type, s.head_dim) * capacity;
}

uint64_t state_bytes(const StateInfo& s, uint32_t capacity, DType kv_type) {
  return round_up(s.num_heads * (key_bytes(s, capacity, kv_type) + value_bytes(s, capacity, kv_type)), 64);
}

}  // namespace

struct SessionState::Impl {
  std::vector<StateInfo> states;
  std::vector<uint64_t> offsets;  // of each state in the mapping
  uint32_t capacity;
  DType kv_type;
  uint32_t length = 0;
  Mapping memory;

  uint8_t* keys(uint32_t state, uint32_t head) const {
    return memory.data() + offsets[state] + head * key_bytes(states[state], capacity, kv_type);
  }
  uint8_t* values(uint32_t state, uint32_t head) const {
    const StateInfo& s = states[state];
    return keys(state, s.num_heads) + head * value_bytes(s, capacity, kv_type);
  }
};

uint64_t SessionState::bytes(const Program& program, uint32_t capacity, DType kv_type) {
  if (capacity < 1 || capacity > kMaxCapacity)
    throw Error("session state: a capacity of " + std::to_string(capacity) + " positions, expected 1 to " +
                std::to_string(kMaxCapacity));
  if (kv_type != DType::kF16 && kv_type != DType::kF32)
    throw Error("session state: keys and values of type " + std::to_string(static_cast<uint32_t>(kv_type)) +
                ", expected F16 (1) or F32 (0)");
  uint64_t total = 0;
  for (const StateInfo& s : program.states) total += state_bytes(s, capacity, kv_type);
  return round_up(total, kPage);
}

SessionState::SessionState(const Program& program, uint32_t capacity, DType kv_type)
    : impl_(new Impl{program.states, {}, capacity, kv_type, 0, Mapping(bytes(program, capacity, kv_type))}) {
  uint64_t at = 0;
  for (const StateInfo& s : program.states) {
    impl_->offsets.push_back(at);
    at += state_bytes(s, capacity, kv_type);
  }
  impl_->memory.commit();
}

SessionState::~SessionState() = default;

bool SessionState::fits(const Program& program) const {
  if (impl_->states.size() != program.states.size()) return false;
  for (size_t i = 0; i < program.states.size(); ++i) {
    const StateInfo &a = impl_->states[i], &b = program.states[i];
    if (a.kind != b.kind || a.num_heads != b.num_heads || a.head_dim != b.head_dim) return false;
  }
  return true;
}

uint32_t SessionState::capacity() const { return impl_->capacity; }
DType SessionState::kv_type() const { return impl_->kv_type; }
uint32_t SessionState::length() const { return impl_->length; }

void SessionState::rollback(uint32_t length) {
  if (length > impl_->length)
    throw Error("session state: rollback to " + std::to_string(length) + " positions, but only " +
                std::to_string(impl_->length) + " hold a token");
  impl_->length = length;
}

void SessionState::append(uint32_t n) { impl_->length += n; }

uint8_t* SessionState::keys(uint32_t state, uint32_t head) const { return impl_->keys(state, head); }
uint8_t* SessionState::values(uint32_t state, uint32_t head) const { return impl_->values(state, head); }

}  // namespace headrace
