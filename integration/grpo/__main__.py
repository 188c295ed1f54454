"""Runs the training job: `torchrun -m lockstep.integration.grpo CONFIG`."""

import os
import sys

from .main import main

if __name__ == "__main__":
    code = main()
    # Everything is on the disk and the process group is gone. Interpreter teardown, which has been seen to hang in a
    # library's thread, must not keep torchrun and the other ranks waiting.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
