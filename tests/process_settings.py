"""Settings of the process that a test file could leave to the next: signals, environment, limits, torch's defaults."""

from __future__ import annotations

import gc
import locale
import logging
import multiprocessing
import os
import resource
import signal
import socket
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch

from tests.new_process import MARK

#: Without SIGALRM, of each test's time-out, and SIGCHLD, which torch's loader takes once for all.
SIGNALS = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGALRM, signal.SIGCHLD}
LIMITS = [name for name in dir(resource) if name.startswith("RLIMIT_")]
#: Environment variables that pytest and `tests.time_outs` set for each part of a test.
OF_PYTEST = ("PYTEST_CURRENT_TEST", MARK)
#: How environment variables begin that libraries set as they are imported: torch's compiler, scikit-learn, Lightning.
OF_LIBRARIES = ("TORCHINDUCTOR_", "KMP_", "PYTORCH_NVML_")
LOGGERS = (None, "torch_dpflow")


def settings() -> dict[str, Any]:
    """Return the settings of this process, by name. To be called by its main thread."""
    wakeup = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    found: dict[str, Any] = {
        f"environment {name}": value
        for name, value in os.environ.items()
        if name not in OF_PYTEST and not name.startswith(OF_LIBRARIES)
    }
    found |= {f"handler of signal {number}": signal.getsignal(number) for number in SIGNALS}
    found |= {name: resource.getrlimit(getattr(resource, name)) for name in LIMITS}
    for name in LOGGERS:
        logger = logging.getLogger(name)
        handlers = [one for one in logger.handlers if not type(one).__module__.startswith("_pytest.")]
        found[f"logger {name}"] = logger.level, logger.propagate, logger.disabled, handlers
    return found | {
        "wake-up descriptor": wakeup,
        "working directory": os.getcwd(),
        "umask": Path("/proc/self/status").read_bytes().partition(b"\nUmask:")[2].partition(b"\n")[0],
        "locale": locale.setlocale(locale.LC_ALL),
        "tempfile.tempdir": tempfile.tempdir,
        "sys.path": [folder for folder in sys.path if not folder.endswith("/ray/thirdparty_files")],
        "__main__": sys.modules["__main__"],
        "excepthooks": (sys.excepthook, threading.excepthook, sys.unraisablehook),
        "switch interval": sys.getswitchinterval(),
        "collector": (gc.isenabled(), gc.get_threshold()),
        "logging.disable": logging.root.manager.disable,
        # None until the first use of the default.
        "start method": multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0],
        "authkey": multiprocessing.current_process().authkey,
        "socket time-out": socket.getdefaulttimeout(),
        "processors": os.sched_getaffinity(0),
        "torch's dtype": torch.get_default_dtype(),
        "torch's device": torch.get_default_device(),
        "torch's threads": torch.get_num_threads(),
        "torch's determinism": torch.get_deterministic_debug_mode(),
        "torch's gradients": torch.is_grad_enabled(),
        "torch's sharing": torch.multiprocessing.get_sharing_strategy(),
    }


def changed(before: dict[str, Any]) -> list[str]:
    """Describe each setting that is another than `before`."""
    now = settings()
    return [
        f"{name}: {before.get(name)!r} before, {now.get(name)!r} now"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    ]
