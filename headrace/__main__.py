"""`python -m headrace`, and what the `headrace` script calls."""

import os
import signal


def main() -> None:
    # Importing takes a moment, and Ctrl-C comes then too.
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, lambda signum, frame: os._exit(130))
    from headrace.cli import main as run

    run()


if __name__ == "__main__":
    main()
