#!/bin/sh
# run.sh plain|address,undefined|thread|arm64: builds the core's tests in build/cpp-<mode> and runs them.
# arm64 is cross-built and runs in an emulator, with the dot product extension and without: kernels and replay, since the
# emulator keeps its own account of memory. Exit status 77 where the tools for it are missing.
set -eu
mode=$1
cd "$(dirname "$0")/../.."
build=build/cpp-$(echo "$mode" | tr ',' '-')

if [ "$mode" = arm64 ]; then
  for tool in aarch64-linux-gnu-g++ qemu-aarch64; do
    command -v $tool >/dev/null && continue
    echo "arm64: not tested: this machine has no $tool (Debian: g++-aarch64-linux-gnu, qemu-user)"
    exit 77
  done
  cmake -S . -B "$build" -G Ninja -DHEADRACE_TESTS=ON -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
    -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ \
    -DCMAKE_CROSSCOMPILING_EMULATOR="qemu-aarch64;-L;/usr/aarch64-linux-gnu" >/dev/null
  cmake --build "$build" --target kernels_test replay_test thread_pool_test
  # Beside ctest, which keeps one log in a build.
  for test in kernels_test replay_test; do
    QEMU_CPU=cortex-a53 qemu-aarch64 -L /usr/aarch64-linux-gnu "$build/$test" || exit
  done >"$build/without.log" 2>&1 &
  QEMU_CPU=max HEADRACE_ISA=neon ctest --test-dir "$build" --output-on-failure -R 'kernels|replay|thread_pool|neon'
  wait $! || { cat "$build/without.log"; exit 1; }
  echo "arm64 without the dot product: $(grep -c '^ok' "$build/without.log") tests passed"
  exit
fi

sanitize=$mode benchmarks=OFF
[ "$mode" = plain ] && sanitize= benchmarks=ON
cmake -S . -B "$build" -G Ninja -DHEADRACE_TESTS=ON -DHEADRACE_BENCHMARKS=$benchmarks \
  -DHEADRACE_SANITIZE="$sanitize" >/dev/null
cmake --build "$build"
# Kernels start no threads, and take minutes where every access is watched for races.
leave_out='^$'
[ "$mode" = thread ] && leave_out='^kernels_test$'
ASAN_OPTIONS=detect_leaks=1 ctest --test-dir "$build" --output-on-failure -E "$leave_out"
