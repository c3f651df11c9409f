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
  ~SessionState();
  SessionState(const SessionState&) = delete;
  SessionState& operator=(const SessionState&) = delete;

  static uint64_t bytes(const Program& program, uint32_t capacity, DType kv_type);

  // Made for a program with the same states.
  bool fits(const Program& program) const;
  uint32_t capacity() const;
  DType kv_type() const;
  // Positions that hold a token. A pass appends; rollback shortens (length <= length()).
  uint32_t length() const;
  void rollback(uint32_t length);
  void append(uint32_t n);  // the executor's, after a pass succeeded
  uint8_t* keys(uint32_t state, uint32_t head) const;
  uint8_t* values(uint32_t state, uint32_t head) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace headrace
