#include "kernels/kernels.h"

#include <cstdlib>
#include <cstring>
#include <string>

#include "kernels/isa.h"
#include "support/error.h"

namespace headrace {
namespace {

bool has_avx512() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("fma");
#else
  return false;
#endif
}

const Kernels& choose() {
  const char* wanted = std::getenv("HEADRACE_ISA");
  if (wanted == nullptr || *wanted == '\0') {
    const Kernels* best = kernels_for("avx512");
    return best != nullptr ? *best : kPortableKernels;
  }
  const Kernels* named = kernels_for(wanted);
  if (named == nullptr) {
    throw Error(std::string("HEADRACE_ISA: '") + wanted + "' is not an instruction set of this processor; it has " +
                (has_avx512() ? "avx512, portable" : "portable"));
  }
  return *named;
}

}  // namespace

const Kernels& kernels() {
  static const Kernels& chosen = choose();
  return chosen;
}

const Kernels* kernels_for(const char* isa) {
  if (std::strcmp(isa, "portable") == 0) return &kPortableKernels;
#if defined(__x86_64__)
  if (std::strcmp(isa, "avx512") == 0 && has_avx512()) return &kAvx512Kernels;
#endif
  return nullptr;
}

}  // namespace headrace
