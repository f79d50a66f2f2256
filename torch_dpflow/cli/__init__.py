"""The command line, `dpflow`: parses arguments and prints, nothing else."""

import sys

#: The exit status of a command that Control-C has ended, as a shell's.
INTERRUPTED = 130


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
