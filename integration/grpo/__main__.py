"""Run the training job: `torchrun -m lockstep.integration.grpo CONFIG`."""

import os
import sys

from .main import main

if __name__ == "__main__":
    code = main()
    # All files are written and the process group is closed. The interpreter's teardown sometimes hangs in a library's
    # thread: skip it, so that torchrun and the other ranks do not wait for it.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
