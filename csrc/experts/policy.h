// Which resident expert goes first. Pure: no locks, no clocks, no files, so that the engine and the trace simulator run
// the same code (DESIGN.md, invariant 5). docs/policies.md defines each policy.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace headrace {

struct LayerShape {
  uint32_t num_experts = 0;
  uint64_t record_bytes = 0;
};

struct PolicyOptions {
  std::string name = "lru";  // one of policy_names()
  // prefill-hot: routes of a layer that count, those of the first passes: the prompt's tokens times routes a token.
  uint64_t hot_routes = 0;
};

// An expert is named by its number when all layers' experts are counted through.
class Policy {
 public:
  // Evicted first: the smallest by (first, second), then the lowest expert.
  struct Key {
    uint64_t first = 0, second = 0;
  };

  explicit Policy(const std::vector<LayerShape>& layers);
  virtual ~Policy() = default;

  // The routes of a layer are known. experts: ascending. Called before their use(). Adds to `changed` experts of which
  // key() is no longer what it was.
  virtual void observe(uint32_t layer, std::span<const uint32_t> experts, std::vector<uint32_t>& changed);
  // A pass uses the expert for num_routes routes.
  virtual void use(uint32_t expert, uint32_t num_routes);
  // It counts as used just now, without a route: only its recency changes.
  void touch(uint32_t expert) { last_use_[expert] = ++num_uses_; }
  // What a later pass will route to, passes in order, layers in order within a pass. Ignored by policies without an
  // oracle.
  virtual void expect(uint32_t layer, std::span<const uint32_t> experts, std::vector<uint32_t>& changed);
  virtual Key key(uint32_t expert) const = 0;

 protected:
  uint64_t last_use(uint32_t expert) const { return last_use_[expert]; }  // 0: never
  uint32_t num_experts() const { return static_cast<uint32_t>(last_use_.size()); }

 private:
  std::vector<uint64_t> last_use_;  // [expert], in uses
  uint64_t num_uses_ = 0;
};

// Error for a name that is none of policy_names().
std::unique_ptr<Policy> make_policy(const PolicyOptions& options, const std::vector<LayerShape>& layers);
std::vector<std::string> policy_names();
// What the policy's tables hold, for the memory plan; without what expect() adds.
uint64_t policy_bytes(const PolicyOptions& options, const std::vector<LayerShape>& layers);

}  // namespace headrace
