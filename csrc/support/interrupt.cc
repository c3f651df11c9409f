#include "support/interrupt.h"

#include <unistd.h>

#include <csignal>

namespace headrace {

void exit_on_interrupt(bool on) {
  static struct sigaction before;
  static bool is_on = false;
  if (on == is_on) return;
  if (on) {
    sigaction(SIGINT, nullptr, &before);
    if (before.sa_handler == SIG_IGN) return;  // as a shell sets it for background jobs
    struct sigaction action = {};
    action.sa_handler = [](int) { _exit(130); };
    sigaction(SIGINT, &action, nullptr);
  } else {
    sigaction(SIGINT, &before, nullptr);
  }
  is_on = on;
}

}  // namespace headrace
