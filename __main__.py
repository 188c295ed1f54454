"""Run `lockstep` as `python -m lockstep`."""

import sys

from .integration.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
