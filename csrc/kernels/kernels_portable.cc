#include "kernels/isa.h"
#include "kernels/lanes_portable.h"
// The lanes come first: the kernels are written over them.
#include "kernels/kernels-inl.h"

namespace headrace {

constinit const Kernels kPortableKernels = make_table("portable");

}  // namespace headrace
