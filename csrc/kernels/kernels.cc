#include "kernels/kernels.h"

#if defined(__aarch64__)
#include <sys/auxv.h>
#endif

#include <cstdlib>
#include <string>
#include <string_view>

#include "kernels/isa.h"
#include "support/error.h"

namespace headrace {
namespace {

#if defined(__x86_64__)
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}

bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("fma");
}
#elif defined(__aarch64__)
bool has_dot_product() { return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0; }
#endif

const Kernels& choose() {
  const char* wanted = std::getenv("HEADRACE_ISA");
  if (wanted == nullptr || *wanted == '\0') return *available_kernels().front();
  const Kernels* named = kernels_for(wanted);
  if (named == nullptr) {
    std::string names;
    for (const Kernels* k : available_kernels()) names += (names.empty() ? "" : ", ") + std::string(k->isa);
    throw Error(std::string("HEADRACE_ISA: '") + wanted + "' is not an instruction set of this processor; it has " +
                names);
  }
  return *named;
}

}  // namespace

const Kernels& kernels() {
  static const Kernels& chosen = choose();
  return chosen;
}

const Kernels* kernels_for(const char* isa) {
  for (const Kernels* k : available_kernels())
    if (std::string_view(k->isa) == isa) return k;
  return nullptr;
}

std::vector<const Kernels*> available_kernels() {
  std::vector<const Kernels*> found;
#if defined(__x86_64__)
  if (has_avx512()) found.push_back(&kAvx512Kernels);
  if (has_avx2()) found.push_back(&kAvx2Kernels);
#elif defined(__aarch64__)
  if (has_dot_product()) found.push_back(&kNeonKernels);
#endif
  found.push_back(&kPortableKernels);
  return found;
}

}  // namespace headrace
