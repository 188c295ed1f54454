"""Objects that stay in the process that made them."""

from typing import NoReturn


class OfOneProcess:
    """A base of objects with threads, locks and a module in use: a copy of one would not work."""

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} cannot be pickled or copied: it has threads, and a module that is in use. Make one "
            "in each process, and keep it out of what is sent there: arguments of processes, data sets, closures"
        )
