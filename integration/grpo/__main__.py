"""Run the training job: `torchrun -m lockstep.integration.grpo CONFIG`."""

import os
import sys
from contextlib import suppress

from ..launcher import end_with_launcher
from .main import main

if __name__ == "__main__":
    end_with_launcher()
    code = main()
    # All files are written and the process group is closed. The interpreter's teardown sometimes hangs in a library's
    # thread: skip it, so that torchrun and the other ranks do not wait for it.
    with suppress(OSError):  # the disk of the log may be full
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
