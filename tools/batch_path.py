"""Print the package's files that run code for one batch: `python tools/batch_path.py [CLONE]`.

It reads a private loader (two workers, a map-style dataset, `shuffle=True`) and a flow (one job, a `dpflow up` of its
own) in steady state. Every process of the run records which functions run in each of its windows. In a window the job
takes some batches in mid-epoch, so that as many others are planned, loaded and stored. As many windows, in which the
job takes nothing, show what runs anyway, as heartbeats do. A file counts if a function of it runs in at least two
thirds of the first windows, and twice as often as in the others. The coordinator, which divides the workers by what is
read, has no part in a batch and is left out.

`--functions` prints these functions too, with their processes and threads.
"""

import mmap
import multiprocessing
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path
from types import FrameType
from typing import Any

WINDOWS = 20
#: Batches of a window: as many as a flow draws at once.
BATCHES = 4
#: The length of a window and the time between two, seconds: enough to load its batches, and less than half the period
#: of any heartbeat.
WINDOW_S, REST_S = 0.2, 0.3
JOB = """
import sys, time
import torch
from torch_dpflow import DPFlowDataLoader
from batch_path import windows

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 100_000
    def __getitem__(self, index):
        return torch.full((3, 32, 32), index % 256, dtype=torch.uint8), index

if __name__ == "__main__":
    flow = {"flow": "rows/path", "address": sys.argv[1]} if len(sys.argv) > 1 else {}
    loader = DPFlowDataLoader(Rows(), batch_size=64, shuffle=True, num_workers=2, **flow)
    windows(iter(loader))
"""


def record() -> None:
    """Record the files that run code in this process and its forks while the first shared byte is not 0."""
    root, directory = os.environ["BATCH_PATH"].split("\n")
    package = os.path.join(root, "torch_dpflow") + os.sep
    with open(os.path.join(directory, "window"), "r+b") as file:
        window = mmap.mmap(file.fileno(), 1)
    log = os.open(os.path.join(directory, "log"), os.O_WRONLY | os.O_APPEND)
    seen: set[tuple[int, int, str, str]] = set()

    def look(frame: FrameType, event: str, argument: Any) -> None:
        if not window[0]:
            return
        code = frame.f_code
        entry = (window[0], os.getpid(), code.co_filename, code.co_name)
        if entry not in seen and code.co_filename.startswith(package):
            seen.add(entry)
            # Not by `current_thread()`, which would register threads that Python has not started.
            threads: Any = threading
            thread = threads._active.get(threading.get_ident())
            place = f"{multiprocessing.current_process().name} {getattr(thread, 'name', '?')}"
            fields = (str(entry[0]), code.co_filename.removeprefix(package), f"{code.co_name} in {place}")
            os.write(log, ("\t".join(fields) + "\n").encode())

    threading.setprofile(look)
    sys.setprofile(look)


def windows(batches: Any) -> None:
    """Read batches, with the number of each window in the shared byte; windows without a batch have even numbers."""
    directory = os.environ["BATCH_PATH"].split("\n")[1]
    with open(os.path.join(directory, "window"), "r+b") as file:
        window = mmap.mmap(file.fileno(), 1)
    for number in range(-10, 2 * WINDOWS):
        window[0] = max(0, number + 1)
        end = time.monotonic() + WINDOW_S
        for _ in range(BATCHES if window[0] % 2 else 0):
            next(batches)
        time.sleep(max(0.0, end - time.monotonic()))
        window[0] = 0
        time.sleep(REST_S)


def measure(root: Path, *, flow: bool) -> dict[str, set[str]]:
    """Return the files on the path of a batch, each with its functions."""
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        (place / "window").write_bytes(b"\0")
        (place / "log").touch()
        (place / "job.py").write_text(JOB)
        (place / "sitecustomize.py").write_text("import batch_path\nbatch_path.record()\n")
        path = os.pathsep.join([directory, str(Path(__file__).parent), str(root), os.environ.get("PYTHONPATH", "")])
        env = {**os.environ, "PYTHONPATH": path, "BATCH_PATH": f"{root}\n{directory}"}
        job = [sys.executable, str(place / "job.py")]
        if not flow:
            subprocess.run(job, env=env, check=True)
        else:
            file = place / "connection.json"
            up = [sys.executable, "-m", "torch_dpflow.cli", "up", "--address", str(file)]
            with subprocess.Popen(up, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as cluster:
                try:
                    while not file.exists():
                        time.sleep(0.1)
                    subprocess.run([*job, str(file)], env=env, check=True)
                finally:
                    cluster.terminate()
        entries = {tuple(line.split("\t")) for line in (place / "log").read_text().splitlines()}
    runs = Counter((int(number) % 2, name, function) for number, name, function in entries)
    found: dict[str, set[str]] = defaultdict(set)
    for (has_batches, name, function), count in sorted(runs.items()):
        if (
            has_batches
            and "dpflow-coordinator" not in function
            and count >= max(2 * WINDOWS / 3, 2 * runs[0, name, function])
        ):
            found[name].add(function)
    return found


def main() -> None:
    arguments = [argument for argument in sys.argv[1:] if argument != "--functions"]
    root = Path(*arguments[:1]).resolve()
    for flow in (False, True):
        found = measure(root, flow=flow)
        print(f"{'a flow' if flow else 'the private loader'}: {len(found)} files")
        for name, functions in found.items():
            print(f"  {name}")
            if len(arguments) + 1 < len(sys.argv):
                print("\n".join(f"      {function}" for function in sorted(functions)))


if __name__ == "__main__":
    main()
