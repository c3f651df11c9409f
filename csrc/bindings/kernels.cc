#include "bindings/bindings.h"

namespace headrace {

void init_kernels(nanobind::module_&) {}

}  // namespace headrace
