// The pipeline model of prefill, for headrace.tune.
#include "experts/pipeline_model.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "support/error.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace headrace {
namespace {

using Groups = nb::ndarray<const double, nb::shape<-1, 3>, nb::c_contig, nb::device::cpu>;

ReadStart read_start(const std::string& schedule) {
  if (schedule == "early") return ReadStart::kEarly;
  if (schedule == "after-routing") return ReadStart::kAfterRouting;
  if (schedule == "on-demand") return ReadStart::kOnDemand;
  throw Error("pipeline model: schedule '" + schedule + "': expected early, after-routing or on-demand");
}

nb::ndarray<nb::numpy, double> to_array(std::vector<double> values) {
  auto* kept = new std::vector<double>(std::move(values));
  nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::vector<double>*>(p); });
  return nb::ndarray<nb::numpy, double>(kept->data(), {kept->size()}, owner);
}

nb::dict to_dict(ModelTimes times) {
  nb::dict out;
  out["read_begin_s"] = to_array(std::move(times.read_begin_s));
  out["read_end_s"] = to_array(std::move(times.read_end_s));
  out["compute_begin_s"] = to_array(std::move(times.compute_begin_s));
  out["compute_end_s"] = to_array(std::move(times.compute_end_s));
  out["routed_s"] = to_array(std::move(times.routed_s));
  out["total_s"] = times.total_s;
  out["read_s"] = times.read_s;
  out["unused_s"] = times.unused_s;
  out["compute_s"] = times.compute_s;
  return out;
}

}  // namespace

void init_pipeline_model(nb::module_& m) {
  nb::class_<PipelineModel>(m, "PipelineModel", "How long streamed prefill takes: csrc/experts/pipeline_model.h.")
      .def(
          "__init__",
          [](PipelineModel* self, const std::vector<double>& non_expert_s, const std::vector<bool>& begins_pass,
             const std::vector<bool>& reads_early, const std::vector<uint32_t>& num_groups, const Groups& groups,
             double after_s) {
            const size_t n = non_expert_s.size();
            if (begins_pass.size() != n || reads_early.size() != n || num_groups.size() != n) {
              throw Error("pipeline model: expected four lists of " + std::to_string(n) + " layers, found " +
                          std::to_string(begins_pass.size()) + ", " + std::to_string(reads_early.size()) + " and " +
                          std::to_string(num_groups.size()));
            }
            std::vector<ModelLayer> layers(n);
            for (size_t l = 0; l < n; ++l) layers[l] = {non_expert_s[l], begins_pass[l], reads_early[l], num_groups[l]};
            std::vector<ModelGroup> model_groups(groups.shape(0));
            for (size_t k = 0; k < model_groups.size(); ++k) {
              const double* group = groups.data() + 3 * k;
              model_groups[k] = {group[0], group[1], group[2]};
            }
            new (self) PipelineModel(std::move(layers), std::move(model_groups), after_s);
          },
          "non_expert_s"_a, "begins_pass"_a, "reads_early"_a, "num_groups"_a, nb::arg("groups").noconvert(),
          "after_s"_a = 0.0,
          "Lists: of each layer. groups: float64 [groups, 3], seconds to read all absent experts, to read those that "
          "have routes, and to compute; layer after layer. after_s: what follows the last layer's experts.")
      .def_prop_ro("num_groups", &PipelineModel::num_groups)
      .def(
          "sweep_banks",
          [](const PipelineModel& model, uint32_t queue_depth, uint32_t banks, uint32_t max_banks,
             const std::string& schedule) {
            const ModelSetting setting{queue_depth, banks, read_start(schedule)};
            std::vector<double> seconds;
            {
              nb::gil_scoped_release release;
              seconds = model.sweep_banks(setting, max_banks);
            }
            return to_array(std::move(seconds));
          },
          "queue_depth"_a, "banks"_a, "max_banks"_a, "schedule"_a = "early",
          "Seconds with each number of banks from `banks` to `max_banks`.")
      .def(
          "times",
          [](const PipelineModel& model, uint32_t queue_depth, uint32_t banks, const std::string& schedule) {
            return to_dict(model.times({queue_depth, banks, read_start(schedule)}));
          },
          "queue_depth"_a, "banks"_a, "schedule"_a = "early",
          "When each group is read and computed (NaN: it is not), when each layer is routed, and sums; seconds.");
}

}  // namespace headrace
