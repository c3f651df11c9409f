#!/bin/sh
# run.sh plain|address,undefined|thread: builds the core's tests in build/cpp-<mode> and runs them.
set -eu
mode=$1
cd "$(dirname "$0")/../.."
build=build/cpp-$(echo "$mode" | tr ',' '-')
sanitize=$mode
[ "$mode" = plain ] && sanitize=
cmake -S . -B "$build" -G Ninja -DHEADRACE_TESTS=ON -DHEADRACE_SANITIZE="$sanitize" >/dev/null
cmake --build "$build"
ASAN_OPTIONS=detect_leaks=1 ctest --test-dir "$build" --output-on-failure
