#include "experts/pipeline_model.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>

#include "support/error.h"

namespace headrace {
namespace {

constexpr double kNone = std::numeric_limits<double>::quiet_NaN();
constexpr double kMaxSeconds = 1e9;

struct GroupTimes {
  double read_begin_s = kNone, read_end_s = kNone, compute_begin_s = kNone, compute_end_s = kNone;
};

}  // namespace

// Of the groups that were read, in the order of their numbers; room for all.
struct PipelineModel::History {
  explicit History(size_t num_groups) : read_end_s(num_groups), bank_free_s(num_groups) {}

  std::vector<double> read_end_s;   // when its lane is free again: d
  std::vector<double> bank_free_s;  // f
  double last_free_s = 0;           // of the banks of numbers up to j - B
  bool waited_for_bank = false;     // a read did, or would have for an earlier number's
};

PipelineModel::PipelineModel(std::vector<ModelLayer> layers, std::vector<ModelGroup> groups, double after_s)
    : layers_(std::move(layers)), groups_(std::move(groups)), after_s_(after_s) {
  const auto require = [](bool holds, const std::string& what) {
    if (!holds) throw Error("pipeline model: expected " + what);
  };
  const auto is_time = [](double t) { return t >= 0 && t < kMaxSeconds; };
  uint64_t num_groups = 0;
  for (const ModelLayer& layer : layers_) {
    require(is_time(layer.non_expert_s), "times of at least 0 s");
    num_groups += layer.num_groups;
  }
  require(num_groups == groups_.size(),
          std::to_string(num_groups) + " groups, as the layers say, found " + std::to_string(groups_.size()));
  require(is_time(after_s_), "times of at least 0 s");
  for (const ModelGroup& group : groups_) {
    require(is_time(group.read_s) && is_time(group.routed_read_s) && is_time(group.compute_s), "times of at least 0 s");
    require(group.routed_read_s <= group.read_s, "no more to be read with routes than without");
    require(group.compute_s > 0 || group.routed_read_s == 0, "nothing to be read for a group without routes");
  }
}

// Numbers are given to groups that are read. The read of number j waits for that of number j - Q and for the bank of
// number j - B, so both are reused in turn.
template <class Record>
double PipelineModel::run(const ModelSetting& setting, History& history, Record&& record) const {
  if (setting.queue_depth == 0 || setting.banks == 0)
    throw Error("pipeline model: expected at least 1 read and 1 bank");
  double* const d = history.read_end_s.data();
  double* const free = history.bank_free_s.data();
  size_t j = 0;  // the next number
  history.last_free_s = 0;
  history.waited_for_bank = false;
  double computed_s = 0;  // f of the last group that was computed, or where the layer before was routed
  double pass_s = 0;      // the pass began
  double turn_s = 0;      // of the last group that is not read once its routes are known: what follows waits for it
  size_t k = 0;
  for (const ModelLayer& layer : layers_) {
    if (layer.begins_pass) pass_s = computed_s;
    const double routed_s = computed_s + layer.non_expert_s;
    const bool waits = setting.read_start != ReadStart::kEarly || !layer.reads_early;
    computed_s = routed_s;
    for (const size_t end = k + layer.num_groups; k < end; ++k) {
      const ModelGroup& group = groups_[k];
      const bool has_routes = group.compute_s > 0;
      GroupTimes t;
      double ready_s = 0;
      if (group.read_s > 0) {
        double a = setting.read_start == ReadStart::kOnDemand ? computed_s : waits ? routed_s : pass_s;
        a = std::max(a, turn_s);
        if (j >= setting.queue_depth) a = std::max(a, d[j - setting.queue_depth]);
        if (j >= setting.banks) {
          const double bank_s = free[j - setting.banks];
          history.last_free_s = std::max(history.last_free_s, bank_s);
          if (history.last_free_s > a) history.waited_for_bank = true;
          a = std::max(a, bank_s);
        }
        if (a < routed_s) {
          t.read_begin_s = a;
          // A read that turns out to be for nothing is broken off.
          t.read_end_s = has_routes ? a + group.read_s : std::min(a + group.read_s, routed_s);
        } else if (group.routed_read_s > 0) {
          t.read_begin_s = a;
          t.read_end_s = a + group.routed_read_s;
        }
        if (group.routed_read_s == 0) turn_s = std::min(a, routed_s);
        if (!std::isnan(t.read_begin_s)) {
          ready_s = t.read_end_s;
          d[j] = t.read_end_s;
          free[j] = routed_s;
          ++j;
        }
      }
      if (has_routes) {
        t.compute_begin_s = std::max(ready_s, computed_s);
        computed_s = t.compute_end_s = t.compute_begin_s + group.compute_s;
        if (!std::isnan(t.read_begin_s)) free[j - 1] = computed_s;
      }
      record(k, t);
    }
  }
  return computed_s + after_s_;
}

std::vector<double> PipelineModel::sweep_banks(const ModelSetting& setting, uint32_t max_banks) const {
  if (max_banks < setting.banks) throw Error("pipeline model: expected no fewer banks at most than at least");
  const auto no_record = [](size_t, const GroupTimes&) {};
  History history(groups_.size());
  ModelSetting s = setting;
  // Where all that may be read is needed, more banks never cost time: then the most banks show what can be reached.
  const bool all_needed = std::all_of(groups_.begin(), groups_.end(),
                                      [](const ModelGroup& group) { return group.routed_read_s == group.read_s; });
  s.banks = max_banks;
  const double least_s = all_needed ? run(s, history, no_record) : 0;
  std::vector<double> seconds;
  s.banks = setting.banks;
  for (;; ++s.banks) {
    seconds.push_back(run(s, history, no_record));
    if (s.banks == max_banks || !history.waited_for_bank || seconds.back() == least_s) break;
  }
  seconds.resize(size_t{max_banks} - setting.banks + 1, seconds.back());  // more banks than that change nothing
  return seconds;
}

ModelTimes PipelineModel::times(const ModelSetting& setting) const {
  ModelTimes out;
  for (auto* times : {&out.read_begin_s, &out.read_end_s, &out.compute_begin_s, &out.compute_end_s}) {
    times->resize(groups_.size(), kNone);
  }
  History history(groups_.size());
  out.total_s = run(setting, history, [&](size_t k, const GroupTimes& t) {
    out.read_begin_s[k] = t.read_begin_s;
    out.read_end_s[k] = t.read_end_s;
    out.compute_begin_s[k] = t.compute_begin_s;
    out.compute_end_s[k] = t.compute_end_s;
    if (!std::isnan(t.read_begin_s)) {
      out.read_s += t.read_end_s - t.read_begin_s;
      if (groups_[k].compute_s == 0) out.unused_s += t.read_end_s - t.read_begin_s;
    }
    out.compute_s += groups_[k].compute_s;
  });
  double computed_s = 0;
  size_t k = 0;
  for (const ModelLayer& layer : layers_) {
    out.compute_s += layer.non_expert_s;
    out.routed_s.push_back(computed_s + layer.non_expert_s);
    computed_s = out.routed_s.back();
    for (const size_t end = k + layer.num_groups; k < end; ++k) {
      if (!std::isnan(out.compute_end_s[k])) computed_s = out.compute_end_s[k];
    }
  }
  out.compute_s += after_s_;
  return out;
}

}  // namespace headrace
