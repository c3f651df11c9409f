// Each subsystem registers its functions with one init; module.cc calls them.
#pragma once

#include <nanobind/nanobind.h>

namespace headrace {

void init_kernels(nanobind::module_& m);         // bindings/kernels.cc
void init_experts(nanobind::module_& m);         // bindings/experts.cc
void init_simulator(nanobind::module_& m);       // bindings/simulator.cc
void init_pipeline_model(nanobind::module_& m);  // bindings/pipeline_model.cc
void init_executor(nanobind::module_& m);        // bindings/executor.cc

}  // namespace headrace
