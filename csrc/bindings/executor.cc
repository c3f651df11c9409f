#include "bindings/bindings.h"

namespace headrace {

void init_executor(nanobind::module_&) {}

}  // namespace headrace
