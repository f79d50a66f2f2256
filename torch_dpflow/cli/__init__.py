"""The command line, `dpflow`: parses arguments and prints, nothing else."""

import sys

from torch_dpflow.cli.exit_status import INTERRUPTED


def main() -> None:
    """The entry point of `dpflow`."""
    try:
        from torch_dpflow.cli.main import root
    except ModuleNotFoundError as error:
        if error.name not in {"click", "rich"}:
            raise
        sys.exit(f"dpflow needs {error.name}; install it with: pip install 'torch_dpflow[cli]'")
    except KeyboardInterrupt:
        print("Aborted!", file=sys.stderr)
        sys.exit(INTERRUPTED)
    root.main(prog_name="dpflow")
