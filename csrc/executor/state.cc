#include "executor/state.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "executor/mapping.h"
#include "experts/expert_source.h"
#include "kernels/kernels.h"
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
  uint32_t capacity;  // positions in its own memory
  DType kv_type;
  uint32_t length = 0;
  std::vector<uint64_t> offsets = {};  // of each state in the memory
  std::optional<Mapping> memory = {};  // none: in a room
  uint8_t* data = nullptr;
  const SessionState* base = nullptr;
  uint32_t base_length = 0, shared = 0;

  void place(uint8_t* at) {
    data = at;
    uint64_t offset = 0;
    for (const StateInfo& s : states) {
      offsets.push_back(offset);
      offset += state_bytes(s, capacity, kv_type);
    }
  }
  uint64_t used_bytes() const {
    uint64_t total = 0;
    for (const StateInfo& s : states) total += state_bytes(s, capacity, kv_type);
    return total;
  }
  bool same_states(const std::vector<StateInfo>& other) const {
    return std::equal(states.begin(), states.end(), other.begin(), other.end(),
                      [](const StateInfo& a, const StateInfo& b) {
                        return a.kind == b.kind && a.num_heads == b.num_heads && a.head_dim == b.head_dim;
                      });
  }

  uint8_t* keys(uint32_t state, uint32_t head) const {
    return data + offsets[state] + head * key_bytes(states[state], capacity, kv_type);
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
    : impl_(new Impl{program.states, capacity, kv_type}) {
  impl_->memory.emplace(bytes(program, capacity, kv_type));
  impl_->memory->commit();
  impl_->place(impl_->memory->data());
}

SessionState::SessionState(const SessionState& room, uint32_t first, uint32_t rows, const SessionState* base,
                           uint32_t base_length)
    : impl_(new Impl{room.impl_->states, rows, room.kv_type(), base_length}) {
  const Impl& from = *room.impl_;
  if (first % kTileRows != 0 || rows % kTileRows != 0 || rows == 0 || from.capacity < rows ||
      from.capacity - rows < first || from.base != nullptr)
    throw Error("session state: positions " + std::to_string(first) + " to " + std::to_string(uint64_t{first} + rows) +
                " of a room of " + std::to_string(from.capacity) + ", expected multiples of 16 inside it");
  // Parts of whole tiles have no padding, so their bytes are their share of positions.
  impl_->place(from.data + impl_->used_bytes() / rows * first);
  if (base == nullptr) {
    if (base_length != 0) throw Error("session state: continues positions of no base");
    return;
  }
  impl_->base = base;
  impl_->base_length = base_length;
  impl_->shared = base_length / kKeyBlock * kKeyBlock;
  if (base->impl_->base != nullptr || base->kv_type() != impl_->kv_type || !impl_->same_states(base->impl_->states) ||
      base_length == 0 || base_length > base->capacity() || base_length - impl_->shared > rows)
    throw Error("session state: cannot continue " + std::to_string(base_length) + " positions of a base of " +
                std::to_string(base->capacity()) + " in " + std::to_string(rows) + " positions");
}

SessionState::~SessionState() = default;

bool SessionState::fits(const Program& program) const { return impl_->same_states(program.states); }

uint32_t SessionState::capacity() const { return impl_->shared + impl_->capacity; }
const SessionState* SessionState::base() const { return impl_->base; }
uint32_t SessionState::base_length() const { return impl_->base_length; }
uint32_t SessionState::shared() const { return impl_->shared; }
DType SessionState::kv_type() const { return impl_->kv_type; }
uint32_t SessionState::length() const { return impl_->length; }

void SessionState::rollback(uint32_t length) {
  if (length > impl_->length)
    throw Error("session state: rollback to " + std::to_string(length) + " positions, but only " +
                std::to_string(impl_->length) + " hold a token");
  if (length < impl_->base_length)
    throw Error("session state: rollback to " + std::to_string(length) + " positions, of which the base has " +
                std::to_string(impl_->base_length));
  impl_->length = length;
}

void SessionState::append(uint32_t n) { impl_->length += n; }

uint8_t* SessionState::keys(uint32_t state, uint32_t head) const { return impl_->keys(state, head); }
uint8_t* SessionState::values(uint32_t state, uint32_t head) const { return impl_->values(state, head); }

void SessionState::copy_rest(uint32_t state, uint32_t head) const {
  const Impl &to = *impl_, &from = *to.base->impl_;
  const uint32_t rest = to.base_length - to.shared, head_dim = to.states[state].head_dim;
  const size_t element = row_bytes(to.kv_type, 1), row = element * head_dim;
  std::memcpy(to.values(state, head), from.values(state, head) + to.shared * row, rest * row);
  // In a tile, each element of 16 keys follows the one before. Later keys of the last tile are not touched.
  const uint8_t* keys = from.keys(state, head) + to.shared * row;
  for (uint32_t key = 0; key < rest; key += kTileRows) {
    const size_t n = std::min(kTileRows, rest - key) * element;
    for (uint32_t d = 0; d < head_dim; ++d) {
      const size_t at = key * row + d * kTileRows * element;
      std::memcpy(to.keys(state, head) + at, keys + at, n);
    }
  }
}

}  // namespace headrace
