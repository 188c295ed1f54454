"""The argument parser of all commands of `lockstep`."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

PACKAGE = __package__.split(".")[0]


class CommandParser(argparse.ArgumentParser):
    """A parser that reports a mistake in one line and exits with 2. Options have their whole names: of a part of one it
    is not known which is meant."""

    def __init__(self, **named: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **named})

    def error(self, message: str) -> NoReturn:
        """Print the mistake on stderr and exit with 2."""
        self.exit(2, f"lockstep: error: {' '.join(message.split())} (see {self.prog} --help)\n")
