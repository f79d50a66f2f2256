"""The command line, `dpflow`. Its modules parse arguments and print; other packages do the work."""

import sys
from typing import Any


def main() -> None:
    """Run the command `dpflow` (its entry point)."""
    try:
        import signal

        signal.signal(signal.SIGALRM, signal.default_int_handler)
        sys.unraisablehook = _interrupt_again
        from torch_dpflow.cli.main import root
    except ModuleNotFoundError as error:
        if error.name not in {"click", "rich"}:
            raise
        sys.exit(f"dpflow needs {error.name}; install it with: pip install 'torch_dpflow[cli]'")
    except KeyboardInterrupt:
        print("Aborted!", file=sys.stderr)
        sys.exit(130)  # `cli.main.INTERRUPTED`
    try:
        root.main(prog_name="dpflow")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        sys.unraisablehook = sys.__unraisablehook__


def _interrupt_again(ignored: Any) -> None:
    """Raise KeyboardInterrupt again soon, because Python has ignored it.

    Python ignores exceptions in finalizers and in callbacks of weak references, which imports use for each module.
    """
    if ignored.exc_type is not KeyboardInterrupt:
        sys.__unraisablehook__(ignored)
        return
    import signal

    signal.setitimer(signal.ITIMER_REAL, 0.01)
