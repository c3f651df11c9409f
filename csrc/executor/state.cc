#include "executor/state.h"

#include <string>
#include <vector>

#include "executor/mapping.h"
#include "experts/expert_source.h"
#include "support/error.h"

namespace headrace {

namespace {

constexpr uint32_t kMaxCapacity = 1u << 28;

uint64_t half_bytes(const StateInfo& s, uint32_t capacity, DType kv_type) {  // keys alone, or values alone
  return row_bytes(kv_type, uint64_t{s.num_heads} * s.head_dim) * capacity;
}

}  // namespace

struct SessionState::Impl {
  std::vector<StateInfo> states;
  std::vector<uint64_t> offsets;  // of each state in the mapping
  uint32_t capacity;
  DType kv_type;
  uint32_t length = 0;
  Mapping memory;

  uint8_t* head(uint32_t state, uint32_t head, bool values) const {
    const StateInfo& s = states[state];
    uint64_t head_bytes = row_bytes(kv_type, s.head_dim) * capacity;
    return memory.data() + offsets[state] + (values ? half_bytes(s, capacity, kv_type) : 0) + head * head_bytes;
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
  for (const StateInfo& s : program.states) total += round_up(2 * half_bytes(s, capacity, kv_type), 64);
  return round_up(total, kPage);
}

SessionState::SessionState(const Program& program, uint32_t capacity, DType kv_type)
    : impl_(new Impl{program.states, {}, capacity, kv_type, 0, Mapping(bytes(program, capacity, kv_type))}) {
  uint64_t at = 0;
  for (const StateInfo& s : program.states) {
    impl_->offsets.push_back(at);
    at += round_up(2 * half_bytes(s, capacity, kv_type), 64);
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

uint8_t* SessionState::keys(uint32_t state, uint32_t head) const { return impl_->head(state, head, false); }
uint8_t* SessionState::values(uint32_t state, uint32_t head) const { return impl_->head(state, head, true); }

}  // namespace headrace
