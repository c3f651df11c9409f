// How long a prompt's passes take when groups of experts are read through a bounded arena while others are computed:
// the max-plus recurrence of EStream (section 3.4, equation 5), over all layers of a request. docs/prefill.md, "The
// model", derives it. Pure: no threads, no clocks.
#pragma once

#include <cstdint>
#include <vector>

namespace headrace {

// When the read of a group may start: as soon as a lane and a bank are free, or not before its layer's routes are
// known, or not before the executor has nothing left to do but wait for it.
enum class ReadStart : uint8_t { kEarly, kAfterRouting, kOnDemand };

struct ModelLayer {
  double non_expert_s = 0;   // from the end of the previous layer's experts to where this layer's routes are known
  bool begins_pass = false;  // no read of it starts before the previous layer's experts are done
  bool reads_early = true;   // under kEarly; otherwise as under kAfterRouting
  uint32_t num_groups = 0;
};

// G experts of a layer in storage order, or what is left of it.
struct ModelGroup {
  double read_s = 0;         // of all its experts that are absent; 0: it is resident and takes no bank
  double routed_read_s = 0;  // of those of them that have routes
  double compute_s = 0;      // 0: it has no routes
};

struct ModelSetting {
  uint32_t queue_depth = 1;  // Q: lanes
  uint32_t banks = 1;        // B
  ReadStart read_start = ReadStart::kEarly;
};

// Seconds since the request began, [group]; all NaN where a group was neither read nor computed.
struct ModelTimes {
  std::vector<double> read_begin_s, read_end_s, compute_begin_s, compute_end_s;
  std::vector<double> routed_s;  // [layer]
  double total_s = 0;
  double read_s = 0;     // sum of all reads
  double unused_s = 0;   // of it, of groups without routes
  double compute_s = 0;  // all that is computed: what a resident run takes
};

class PipelineModel {
 public:
  // Error if groups and layers do not fit each other, or for a time that is negative or not finite.
  // after_s: what follows the last layer's experts.
  PipelineModel(std::vector<ModelLayer> layers, std::vector<ModelGroup> groups, double after_s);

  // Seconds in all, with each number of banks from setting.banks to max_banks.
  std::vector<double> sweep_banks(const ModelSetting& setting, uint32_t max_banks) const;
  ModelTimes times(const ModelSetting& setting) const;
  uint32_t num_groups() const { return static_cast<uint32_t>(groups_.size()); }

 private:
  struct History;
  template <class Record>
  double run(const ModelSetting& setting, History& history, Record&& record) const;

  const std::vector<ModelLayer> layers_;
  const std::vector<ModelGroup> groups_;
  const double after_s_;
};

}  // namespace headrace
