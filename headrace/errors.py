"""The package's exceptions. Library code raises them; only cli.py turns them into an exit status."""


class HeadraceError(Exception):
    """A problem with the input or the machine.

    The message is one line: what, where (file, offset, tensor), expected, found, what to do.
    """


class UsageError(HeadraceError):
    """An option that does not fit the others, or the file that it is used on, where the file is not at fault.

    option: as it is written. The message says what was expected, found, and what to do.
    """

    def __init__(self, option: str, message: str):
        super().__init__(message)
        self.option = option
