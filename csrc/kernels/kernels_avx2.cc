// Compiled with AVX2: nothing here may have a definition that another file could share (no inline functions of
// the standard library, no dynamic initialisation), or older processors would meet these instructions.
#include "kernels/isa.h"

#if defined(__x86_64__)

#include "kernels/lanes_avx2.h"
// The lanes come first: the kernels are written over them.
#include "kernels/kernels-inl.h"

namespace headrace {

constinit const Kernels kAvx2Kernels = make_table("avx2");

}  // namespace headrace

#endif
