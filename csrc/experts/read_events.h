// What happened to a Residency in one pass beside the routes: enough to do it all again without files and clocks
// (DESIGN.md, invariant 5). 32-bit words: an event's kind in the low 4 bits, its argument above; operands may follow.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

namespace headrace {

enum class ReadEvent : uint32_t {
  kBegin = 0,        // layer
  kRelease = 1,      // index in the layer's experts
  kEnd = 2,          //
  kLanded = 3,       // first expert of the read; then the bytes read of each of its experts that was unwanted
  kFailed = 4,       // first expert of the read; then the bytes read of each of its experts
  kForecast = 5,     // layer; then n and n experts
  kBeginStream = 6,  // 1 if the first pass of a prompt; then G, Q, B, reads early, and a word for each layer
  kEndStream = 7,    //
  kResize = 8,       // then the arena's bytes, low and high word
  kHold = 9,         // 1: no read starts from now on; 0: they may again
};

class ReadEventLog {
 public:
  bool is_on = false;
  void add(ReadEvent kind, uint32_t argument, std::span<const uint32_t> operands = {}) {
    if (!is_on) return;
    words_.push_back(argument << 4 | static_cast<uint32_t>(kind));
    words_.insert(words_.end(), operands.begin(), operands.end());
  }
  std::vector<uint32_t> take() { return std::exchange(words_, {}); }

 private:
  std::vector<uint32_t> words_;
};

}  // namespace headrace
