// How fast a sequence of layers with given loads can be at best, whatever the order in which the link moves them.
// docs/policies.md, "The schedule bound", says what is bounded and why. Pure, as Residency is.
#pragma once

#include <cstdint>
#include <deque>
#include <set>
#include <vector>

namespace headrace {

struct LinkOptions {
  double bytes_per_s = 0;
  double latency_s = 0;
  std::vector<double> before_s;  // [layer], from its start to where its routes are known
  std::vector<double> after_s;   // [layer], its experts and what follows
  // Where a layer's routes are known, ascending: each tells the routes that later passes have in the layers after the
  // trigger before it, up to itself. Layers after the last one are never told ahead.
  std::vector<uint32_t> triggers;
  uint32_t horizon = 1;  // later passes that a trigger tells of
};

class ScheduleBound {
 public:
  // record_bytes: of each layer. Error if the options do not fit it.
  ScheduleBound(std::vector<uint64_t> record_bytes, LinkOptions options);

  // Layers in order, pass after pass: distinct experts used, and those of them that must be moved.
  void add(uint32_t num_used, uint32_t num_loads);
  // There are no more passes.
  void finish();

  double seconds() const { return now_; }  // until the last layer ends
  double compute_seconds() const { return compute_; }
  double link_seconds() const { return link_; }

 private:
  enum class State : uint8_t { kUntold, kMoving, kReady };
  struct Work {
    uint32_t num_used = 0, num_loads = 0;
    State state = State::kUntold;
    double told_s = 0, left_s = 0, ready_s = 0;
  };

  void run_pass();
  void tell(uint64_t place, uint32_t layer);
  void move(double seconds);
  Work& work(uint64_t place) { return works_[place - first_place_]; }
  double transfer_s(const Work& work, uint32_t layer) const;

  const std::vector<uint64_t> record_bytes_;
  const LinkOptions options_;
  std::vector<uint32_t> trigger_of_;  // [layer]; no trigger: the number of layers
  std::deque<Work> works_;            // pass after pass, from the one that runs next
  uint64_t first_place_ = 0;          // of works_: layers of passes, counted through
  std::set<uint64_t> moving_;         // places whose loads are on their way, the first deadline first
  double now_ = 0, compute_ = 0, link_ = 0;
};

}  // namespace headrace
