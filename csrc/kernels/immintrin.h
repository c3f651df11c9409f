// x86 intrinsics, without the warnings that GCC 12 gives about its own.
#pragma once

#if defined(__GNUC__) && !defined(__clang__)
// GCC 12 takes its own intrinsics' deliberately undefined operands for mistakes.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#else
#include <immintrin.h>
#endif
