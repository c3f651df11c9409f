// The tables, one translation unit each. Only kernels.cc decides which of them this processor may run.
#pragma once

#include "kernels/kernels.h"

namespace headrace {

extern const Kernels kPortableKernels;
#if defined(__x86_64__)
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
#elif defined(__aarch64__)
extern const Kernels kNeonKernels;
#endif

}  // namespace headrace
