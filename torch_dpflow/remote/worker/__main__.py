"""Command that runs a remote worker: its launch spec is in a file, the environment or standard input.

It defines few names, because a worker puts the classes of the user's script into this module, `__main__`.
"""

import os
import sys

from torch_dpflow.remote.launchers.processes import take_launch_spec
from torch_dpflow.remote.worker import run

if __name__ == "__main__":
    code = run(take_launch_spec(*sys.argv[1:2]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # torch takes a second to leave an interpreter, for which the process that waits would wait
