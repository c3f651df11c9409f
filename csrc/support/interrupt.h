// What SIGINT does while native calls that cannot be polled are running (loading). For the command line only.
#pragma once

namespace headrace {

// on: SIGINT ends the process at once with status 130, running no destructors. off: the handler from before.
// Only where nothing half-written can be left behind.
void exit_on_interrupt(bool on);

}  // namespace headrace
