// The one exception of the core. The message is one line that a user can act on: what, where,
// expected, found, what to do. Bindings turn it into headrace.errors.HeadraceError.
#pragma once

#include <stdexcept>
#include <string>

namespace headrace {

class Error : public std::runtime_error {
 public:
  explicit Error(const std::string& message) : std::runtime_error(message) {}
};

// Thrown by a pass whose `should_stop` said yes. State written by the pass is discarded by the caller.
class Cancelled : public std::runtime_error {
 public:
  Cancelled() : std::runtime_error("cancelled") {}
};

}  // namespace headrace
