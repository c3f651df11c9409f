#include "support/interrupt.h"

#include <unistd.h>

#include <csignal>

namespace headrace {

void exit_on_interrupt(bool on) {
  static struct sigaction before;
  static bool is_on = false;
  if (on == is_on) return;
  if (on) {
    struct sigaction action = {};
    action.sa_handler = [](int) { _exit(130); };
    sigaction(SIGINT, &action, &before);
    if (before.sa_handler == SIG_IGN) sigaction(SIGINT, &before, nullptr);  // as a shell's background jobs are started
  } else {
    sigaction(SIGINT, &before, nullptr);
  }
  is_on = on;
}

}  // namespace headrace
