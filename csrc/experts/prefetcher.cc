#include "experts/prefetcher.h"

#include <utility>

namespace headrace {

void Prefetcher::forecast(uint32_t layer, std::vector<uint32_t> experts) {
  for (const uint32_t e : forecasts_[layer]) is_forecast_[e] = false;
  for (const uint32_t e : experts) is_forecast_[e] = true;
  forecasts_[layer] = std::move(experts);
}

uint32_t Prefetcher::start(Residency& residency, uint32_t layer) {
  const uint32_t num_layers = static_cast<uint32_t>(forecasts_.size());
  for (uint32_t ahead = 0; ahead < num_layers; ++ahead) {
    for (const uint32_t expert : forecasts_[(layer + 1 + ahead) % num_layers]) {
      if (residency.state(expert) != Residency::State::kAbsent) continue;
      const auto is_needed_before = [&](uint32_t e) {
        return is_forecast_[e] && (residency.layer_of(e) + 2 * num_layers - layer - 1) % num_layers <= ahead;
      };
      return residency.prefetch(expert, is_needed_before) ? expert : Residency::kNone;
    }
  }
  return Residency::kNone;
}

std::vector<uint32_t> NoisyOracle::forecast(const Residency& residency, uint32_t layer, uint32_t num_experts,
                                            std::span<const uint32_t> ids) {
  const uint32_t first = residency.first_expert(layer);
  std::vector<bool> is_needed(num_experts, false);
  for (const uint32_t id : ids) is_needed[id] = true;
  std::vector<uint32_t> others, guess;
  for (uint32_t id = 0; id < num_experts; ++id) {
    if (!is_needed[id]) others.push_back(first + id);
  }
  const auto chance = [&] { return static_cast<double>(random_() >> 11) * 0x1p-53; };
  for (const uint32_t id : ids) {
    if (residency.state(first + id) != Residency::State::kAbsent || chance() < recall_) {
      guess.push_back(first + id);
    } else if (!others.empty()) {
      std::swap(others[random_() % others.size()], others.back());
      guess.push_back(others.back());
      others.pop_back();
    }
  }
  return guess;
}

}  // namespace headrace
