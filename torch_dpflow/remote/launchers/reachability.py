"""Tries a platform in a process of its own, as its library may start threads or end the process."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import closing

from torch_dpflow import errors
from torch_dpflow.errors import DPFlowError, OptionError
from torch_dpflow.remote.launchers.registry import resolve

#: How long that may take, seconds.
CHECK_S = 120.0


def check_reachable(platform: str, listen: str) -> None:
    """Raise what connecting to a platform raises, or OptionError where members cannot reach `listen`.

    listen: empty: where the platform says.
    """
    command = [sys.executable, "-m", __name__, platform, listen]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=CHECK_S)
    except subprocess.TimeoutExpired:
        raise OptionError(
            f"platform={platform!r} does not answer within {CHECK_S:g} s; is it up, and reachable from here?"
        ) from None
    if done.returncode == 0:
        return
    try:
        name, text = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        name, text = "OptionError", f"platform={platform!r} cannot be used: {done.stderr.strip()[-2000:]}"
    kind: type[DPFlowError] = getattr(errors, name, OptionError)
    raise kind(text)


def _check(platform: str, listen: str) -> int:
    try:
        spec = resolve(platform)
        with closing(spec.launcher()) as launcher:
            launcher.check()
        if listen:
            spec.check_listen(listen)
        else:
            spec.listen_at()
    except DPFlowError as error:
        print(json.dumps((type(error).__name__, str(error))), flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_check(*sys.argv[1:3]))
