"""Run the worker whose launch spec is in a file, the environment or standard input.

The names of this module are `__main__`'s, where the user's script has its own, so there are few here.
"""

import os
import sys

from torch_dpflow.remote.launchers.processes import take_launch_spec
from torch_dpflow.remote.worker import run

if __name__ == "__main__":
    code = run(take_launch_spec(*sys.argv[1:2]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(
        code
    )  # torch takes a second to leave an interpreter, and the process that waits for the end would wait this long
