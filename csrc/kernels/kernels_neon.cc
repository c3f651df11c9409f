// Compiled with the dot product extension: nothing here may have a definition that another file could share (no inline
// functions of the standard library, no dynamic initialisation), or older processors would meet these instructions.
#include "kernels/isa.h"

#if defined(__aarch64__)

#include "kernels/lanes_neon.h"
// The lanes come first: the kernels are written over them.
#include "kernels/kernels-inl.h"

namespace headrace {

constinit const Kernels kNeonKernels = make_table("neon");

}  // namespace headrace

#endif
