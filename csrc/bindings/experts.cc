#include "bindings/bindings.h"

namespace headrace {

void init_experts(nanobind::module_&) {}

}  // namespace headrace
