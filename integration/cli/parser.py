"""How every command of `lockstep` answers a mistake."""

from __future__ import annotations

import argparse
from typing import NoReturn

PACKAGE = __package__.split(".")[0]


class CommandParser(argparse.ArgumentParser):
    """Answers a mistake in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"lockstep: error: {' '.join(message.split())} (see {self.prog} --help)\n")
