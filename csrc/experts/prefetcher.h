// What is read on a guess before a layer asks for it: which expert next, and, for measurement, guesses of a known
// quality. Pure, as Residency is; ExpertMemory and Simulator drive the same code.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

#include "experts/residency.h"

namespace headrace {

// Keeps the newest forecast of each layer's next pass. Experts are numbered through, as in Residency.
class Prefetcher {
 public:
  Prefetcher(uint32_t num_layers, uint32_t num_experts) : forecasts_(num_layers), is_forecast_(num_experts, false) {}

  // experts: those that the layer's next pass will need, the most wanted first.
  void forecast(uint32_t layer, std::vector<uint32_t> experts);
  // Of the absent experts that were forecast, the one that is needed first once `layer` has run: started in
  // `residency`, or kNone if none may start. What is forecast to be needed before it makes no room for it.
  uint32_t start(Residency& residency, uint32_t layer);

 private:
  std::vector<std::vector<uint32_t>> forecasts_;  // [layer]
  std::vector<bool> is_forecast_;                 // [expert]
};

// An oracle that errs: of the experts that a layer will need and that are absent when it is asked, it names each with
// probability `recall`, and one of the layer's others in place of each that it does not.
class NoisyOracle {
 public:
  NoisyOracle(double recall, uint64_t seed) : recall_(recall), random_(seed) {}
  // ids: what the layer's next pass needs, ascending. Returns experts, numbered through.
  std::vector<uint32_t> forecast(const Residency& residency, uint32_t layer, uint32_t num_experts,
                                 std::span<const uint32_t> ids);

 private:
  const double recall_;
  std::mt19937_64 random_;
};

}  // namespace headrace
