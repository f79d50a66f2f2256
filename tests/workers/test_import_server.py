"""Processes of a group share what is imported for it, and start without that where the imports fail."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from tests.new_process import ROOT, Interpreter
from tests.shared_cluster import wait
from tests.worker_cases import has_ended

#: Starts two processes for each of several groups, and prints what they have found.
PROGRAM = """
import json, math, os, sys, time
from multiprocessing import forkserver
from pathlib import Path
from torch_dpflow.workers.fork_server import ForkServerPlatform, end_fork_server
from torch_dpflow.workers.import_server import StillImportingError
from torch_dpflow.workers.platform import Imports, ProcessSpec

HANG = "hangs", "holds", "stops", "blocks"

def look(module, file):
    found = {"parent": os.getppid(), "has_module": module in sys.modules}
    Path(f"{file}.part").write_text(json.dumps(found))
    os.rename(f"{file}.part", file)
    time.sleep(600)

def launch(platform, spec):
    while True:
        try:
            return platform.launch(spec)
        except StillImportingError:
            time.sleep(0.01)

def found(folder, platform, group, module):
    imports = Imports(group=group, modules=("json", module), own=("mine",), directory=str(folder))
    handles = []
    for number in range(2):
        file = folder / f"{group}-{number}"
        arguments = module, str(file)
        spec = ProcessSpec(name=file.name, incarnation=1, target=look, arguments=arguments, imports=imports)
        handles.append(launch(platform, spec))
    files = [folder / f"{group}-{number}" for number in range(2)]
    while not all(file.exists() for file in files):
        time.sleep(0.01)
    return handles, [json.loads(file.read_text()) for file in files]

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    if sys.argv[2:] == ["hangs"]:
        found(folder, ForkServerPlatform(preload=["torch"], timeouts_s=(60.0, 600.0), outlived=True), "hangs", "hangs")
    platform = ForkServerPlatform(preload=["torch"], timeouts_s=(60.0, 60.0), outlived=True)
    out = {}
    for group, module in [("a", "good"), ("b", "good"), *((name, name) for name in sys.argv[2:] if name not in HANG)]:
        handles, out[group] = found(folder, platform, group, module)
        if group == "a":
            servers = list(platform._import_servers.values())
            for handle in handles:
                handle.kill()
            ended = []
            while len(ended) < 2 or platform._import_servers:
                ended += platform.take_ended()
                time.sleep(0.01)
            servers[0]._handle.process.join()
            out["code"] = servers[0]._handle.process.exitcode
    if "raises" in sys.argv:
        out["lasting"] = sorted(one.group for one, at in platform._not_before.items() if at == math.inf)
        (folder / "raises.py").write_text("")
        for number in range(2):
            (folder / f"raises-{number}").unlink()
        for imports in platform._not_before:
            platform._not_before[imports] = 0.0  # the pause is over
        _, out["repaired"] = found(folder, platform, "raises", "raises")
    out["fork server"] = forkserver._forkserver._forkserver_pid
    usual = forkserver.ForkServer.connect_to_new_process
    def changed(self, fds):
        assert self._forkserver_pid, "as multiprocessing of another Python may differ"
        return usual(self, fds)
    forkserver.ForkServer.connect_to_new_process = changed
    _, out["changed"] = found(folder, platform, "changed", "json")
    hasty = ForkServerPlatform(timeouts_s=(60.0, 0.2), outlived=True)
    for name in HANG:
        _, out[name] = found(folder, hasty, name, name)
    hasty.close()
    platform.close()
    end_fork_server()
    print(json.dumps(out))
"""
MODULES = {
    "good": "open('imported', 'a').write('once ')",
    "raises": "raise ValueError",
    "asks": "try: import mine\nexcept ImportError: mine = None",
    "exits": "raise SystemExit(3)",
    "ends": "import os; os._exit(3)",
    "starts": "import threading, time; threading.Thread(target=time.sleep, args=(600,), daemon=True).start()",
    "holds": "import ctypes; ctypes.PyDLL(None).sleep(600)  # keeps the interpreter's lock",
    "stops": "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)",
    "blocks": "import signal, time; signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65)); time.sleep(600)",
    "hangs": "import os, time; open('hanging', 'a').write(f'{os.getpid()} '); time.sleep(600)",
}


def started(folder: Path, *modules: str, preloaded: bool = False) -> Interpreter:
    for name, text in MODULES.items():
        (folder / f"{name}.py").write_text(text)
    (folder / "program.py").write_text(PROGRAM)
    environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    command = [sys.executable, str(folder / "program.py"), str(folder), *modules]
    return Interpreter(command, preloaded=preloaded, fork_server=True, env=environment, cwd=ROOT)


def test_a_group_imports_once_and_processes_start_without_imports_that_fail(tmp_path: Path) -> None:
    process = started(tmp_path, *MODULES)
    printed, errors = process.communicate()
    assert process.returncode == 0, errors
    out = json.loads(printed)
    parents = {name: {one["parent"] for one in out[name]} for name in ("a", "b", *MODULES)}
    assert {name: {one["has_module"] for one in out[name]} for name in ("a", "b", *MODULES)} == {
        name: {name in ("a", "b", "good")} for name in ("a", "b", *MODULES)
    }
    assert (tmp_path / "imported").read_text() == "once " * 3, "once a group, in its directory"
    assert {one["parent"] for one in out["changed"]} == {out["fork server"]}
    assert len(parents["a"]) == len(parents["b"]) == 1
    assert len(parents["a"] | parents["b"] | {out["fork server"]}) == 3
    assert out["code"] == 0, "it ends with its group"
    assert all(parents[name] == {out["fork server"]} for name in MODULES if name != "good")
    assert out["lasting"] == ["asks", "starts"]
    assert [one["has_module"] for one in out["repaired"]] == [True, True], "it is tried again after a pause"
    assert out["fork server"] not in {one["parent"] for one in out["repaired"]}


def test_an_import_that_hangs_ends_with_a_killed_starter(tmp_path: Path) -> None:
    process = started(tmp_path, "hangs", preloaded=True)
    hanging = tmp_path / "hanging"
    wait(lambda: hanging.exists() and hanging.read_text().endswith(" "))
    process.send_signal(signal.SIGKILL)
    process.communicate()
    wait(lambda: has_ended(int(hanging.read_text())))
