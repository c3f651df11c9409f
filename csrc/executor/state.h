// What one session keeps between passes: for each state of the program, keys and values of every position.
#pragma once

#include <cstdint>
#include <memory>

#include "executor/program.h"

namespace headrace {

class SessionState {
 public:
  // Maps and commits (prefaults) room for `capacity` positions. kv_type: F16 or F32.
  // Layout of one state: the keys of each head, a matrix [capacity, head_dim] in tile layout (kernels/dtype.h), then
  // the values, [num_heads, capacity, head_dim].
  SessionState(const Program& program, uint32_t capacity, DType kv_type);
  // A state in a part of another's memory: `rows` positions from `first` on, both multiples of 16, of a room that is
  // used for nothing else. With a base, it continues the base's first `base_length` positions: whole blocks of keys are
  // read where the base has them, the rest is copied in the pass that appends first, and `rows` hold that rest too. The
  // base may get these positions in the same pass. It has no base itself. Room and base must outlive the state.
  SessionState(const SessionState& room, uint32_t first, uint32_t rows, const SessionState* base, uint32_t base_length);
  ~SessionState();
  SessionState(const SessionState&) = delete;
  SessionState& operator=(const SessionState&) = delete;

  static uint64_t bytes(const Program& program, uint32_t capacity, DType kv_type);

  // Made for a program with the same states.
  bool fits(const Program& program) const;
  uint32_t capacity() const;
  DType kv_type() const;
  const SessionState* base() const;
  uint32_t base_length() const;
  // Positions that lie in the base: base_length() in whole blocks.
  uint32_t shared() const;
  // Positions that hold a token. A pass appends; rollback shortens (base_length() <= length <= length()).
  uint32_t length() const;
  void rollback(uint32_t length);
  void append(uint32_t n);  // the executor's, after a pass succeeded
  // Of positions from shared() on.
  uint8_t* keys(uint32_t state, uint32_t head) const;
  uint8_t* values(uint32_t state, uint32_t head) const;
  // Brings keys and values of [shared(), base_length()) from the base.
  void copy_rest(uint32_t state, uint32_t head) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace headrace
