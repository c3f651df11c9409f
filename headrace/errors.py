"""The package's one exception. Library code raises it; only cli.py turns it into an exit status."""


class HeadraceError(Exception):
    """A problem with the input or the machine.

    The message is one line: what, where (file, offset, tensor), expected, found, what to do.
    """
