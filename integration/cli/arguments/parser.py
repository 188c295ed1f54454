"""The argument parser of all commands of `lockstep`."""

from __future__ import annotations

import argparse
from typing import NoReturn

PACKAGE = __package__.split(".")[0]


class CommandParser(argparse.ArgumentParser):
    """A parser that reports a mistake in one line and exits with 2."""

    def error(self, message: str) -> NoReturn:
        """Print the mistake on stderr and exit with 2."""
        self.exit(2, f"lockstep: error: {' '.join(message.split())} (see {self.prog} --help)\n")
