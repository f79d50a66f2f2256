"""Elastic Container Instance without a cloud: an HTTP control plane for the vendor's real client, groups as processes.

It checks signatures, taking each once, and parameters, has a quota, remembers tokens, and refuses requests or loses
answers where a test says so. What it cannot show: billing, whether hosts of a VPC reach each other, images and their
pulls.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import psutil

from tests.new_process import ROOT
from tests.remote.launchers.fc_server.server import Fault, Key, Refusal, Signatures

VERSION = "2018-08-08"
_TEXT = r"[\s\S]+"
_COMMON = {"RegionId": "[a-z0-9-]+"}
_TAG = {r"Tag\.([1-9]|1\d|20)\.Key": r"[\s\S]{1,64}", r"Tag\.([1-9]|1\d|20)\.Value": r"[\s\S]{0,128}"}
#: By the action, the parameters that it documents, and what each may be.
PARAMETERS = {
    "CreateContainerGroup": {
        **_COMMON,
        **_TAG,
        "ContainerGroupName": r"[a-z0-9](?:[a-z0-9-]{0,126}[a-z0-9])",
        "ClientToken": r"[\x21-\x7e]{1,64}",
        "VSwitchId": r"vsw-\w+",
        "SecurityGroupId": r"sg-\w+",
        "Cpu|Memory": r"\d+(\.\d+)?",
        "RestartPolicy": "Always|Never|OnFailure",
        "TerminationGracePeriodSeconds": r"\d+",
        "SpotStrategy": "NoSpot|SpotAsPriceGo|SpotWithPriceLimit",
        r"Volume\.\d+\.Name": "[a-z0-9-]{1,63}",
        r"Volume\.\d+\.Type": "ConfigFileVolume",
        r"Volume\.\d+\.ConfigFileVolume\.ConfigFileToPath\.\d+\.Path": r"[\w./-]+",
        r"Volume\.\d+\.ConfigFileVolume\.ConfigFileToPath\.\d+\.Content": r"[A-Za-z0-9+/=]{4,43692}",
        r"Container\.\d+\.(Name|Image)": _TEXT,
        r"Container\.\d+\.(Command|Arg)\.\d+": _TEXT,
        r"Container\.\d+\.EnvironmentVar\.\d+\.(Key|Value)": _TEXT,
        r"Container\.\d+\.VolumeMount\.\d+\.(Name|MountPath)": _TEXT,
        r"Container\.\d+\.VolumeMount\.\d+\.ReadOnly": "true|false|True|False",
    },
    "DescribeContainerGroups": {**_COMMON, **_TAG, "Limit": "[1-9]|1[0-9]|20", "NextToken": r"\d+"},
    "DeleteContainerGroup": {**_COMMON, "ContainerGroupId": r"eci-\w+"},
}
NEEDED = {
    "CreateContainerGroup": {"RegionId", "ContainerGroupName", "Container.1.Name", "Container.1.Image"},
    "DescribeContainerGroups": {"RegionId"},
    "DeleteContainerGroup": {"RegionId", "ContainerGroupId"},
}


@dataclass
class Group:
    """One container group, with the process of its container."""

    id: str
    asked: Mapping[str, str]
    folder: Path
    process: subprocess.Popen[bytes] | None = None
    #: Where no process tells it.
    status: str = "Running"

    @property
    def name(self) -> str:
        return self.asked["ContainerGroupName"]

    @property
    def tags(self) -> list[dict[str, str]]:
        return [{"Key": key, "Value": value} for key, value in _pairs(self.asked, "Tag")]

    def view(self) -> dict[str, Any]:
        if self.process is not None and self.process.poll() is not None:
            self.status = "Failed" if self.process.returncode else "Succeeded"
        own = {"ContainerGroupId": self.id, "ContainerGroupName": self.name, "Status": self.status}
        return {**own, "Tags": self.tags, "IntranetIp": "10.0.0.9"}

    def start(self) -> None:
        """Run its container: with its files, variables and arguments, beside others on this host."""
        place = "Volume.1.ConfigFileVolume.ConfigFileToPath.1"
        (self.folder / self.asked[f"{place}.Path"]).write_bytes(
            base64.b64decode(self.asked[f"{place}.Content"], validate=True)
        )
        mounted = self.asked["Container.1.VolumeMount.1.MountPath"]
        words = [*_values(self.asked, "Container.1.Command"), *_values(self.asked, "Container.1.Arg")]
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        own = {"PATH": path, "PYTHONPATH": str(ROOT), "TMPDIR": str(self.folder)}
        with open(self.folder / "log", "wb") as out:
            self.process = subprocess.Popen(
                [str(self.folder) if word == mounted else word for word in words],
                env={**os.environ, **dict(_pairs(self.asked, "Container.1.EnvironmentVar")), **own},
                stdout=out,
                stderr=out,
            )

    def log(self) -> str:
        return (self.folder / "log").read_text()

    def kill(self) -> None:
        """End all that it runs, as the loss of its host does."""
        if self.process is None:
            return
        with suppress(psutil.NoSuchProcess):
            first = psutil.Process(self.process.pid)
            them = [first, *first.children(recursive=True)]
            for one in them:
                with suppress(psutil.NoSuchProcess):
                    one.kill()
            psutil.wait_procs(them[1:], timeout=10)
        self.process.wait()


class GroupServer:
    """The control plane of one account in one region.

    Args:
        keys: those that are valid, by their ids.
        quota: most groups that run at once.
        runs: whether groups run their containers' commands.
    """

    def __init__(self, keys: Mapping[str, Key], *, quota: int = 100, runs: bool = False) -> None:
        self.keys, self.quota, self.runs = dict(keys), quota, runs
        self._signatures = Signatures(self.keys)
        #: By id: those that are there; and by token, the ids of all that ever were.
        self.groups: dict[str, Group] = {}
        self.tokens: dict[str, str] = {}
        #: By the action, what becomes of the next requests; all that was asked, as (action, status).
        self.faults: dict[str, deque[Fault]] = {}
        self.log: list[tuple[str, int]] = []
        self._lock = threading.Lock()
        self._folder = tempfile.mkdtemp(prefix="eci-")
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), type("_Bound", (_Handler,), {"owner": self}))
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True)
        self.endpoint = f"http://127.0.0.1:{self._http.server_address[1]}"

    def __enter__(self) -> GroupServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join(30)
        for group in [*self.groups.values()]:
            group.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def fault(self, action: str, *faults: Fault) -> None:
        """What becomes of the next requests of this kind."""
        self.faults.setdefault(action, deque()).extend(faults)

    def count(self, action: str) -> int:
        return [one for one, _ in self.log].count(action)

    def check(self, method: str, target: str, headers: Mapping[str, str], body: bytes) -> None:
        """Raise Refusal unless it is signed with a valid key, for the first time, and of this version."""
        self._signatures.check(method, target, headers, body)
        if headers.get("x-acs-version") != VERSION:
            raise Refusal(400, "InvalidVersion", "Specified parameter Version is not valid.")

    def serve(self, action: str, asked: Mapping[str, str]) -> dict[str, Any]:
        """Do what is asked. Raises Refusal."""
        for name, value in asked.items():
            allowed = [form for key, form in PARAMETERS[action].items() if re.fullmatch(key, name)]
            if not allowed or not re.fullmatch(allowed[0], value):
                raise Refusal(400, "InvalidParameter", f"The specified parameter {name} is not valid.")
        if missing := NEEDED[action] - asked.keys():
            raise Refusal(400, "MissingParameter", f"{sorted(missing)}")
        with self._lock:
            if action == "CreateContainerGroup":
                return {"ContainerGroupId": self._create(asked)}
            if action == "DescribeContainerGroups":
                return self._page(asked)
            group = self.groups.pop(asked["ContainerGroupId"], None)
        if group is None:
            raise Refusal(404, "InvalidParameter.ContainerGroupId.NotFound", "there is no such group")
        if group.process is not None and group.process.poll() is None:
            group.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                group.process.wait(int(group.asked["TerminationGracePeriodSeconds"]))
        group.kill()
        return {}

    def _create(self, asked: Mapping[str, str]) -> str:
        token = asked.get("ClientToken", "")
        if token in self.tokens:
            return self.tokens[token]
        if sum(one.view()["Status"] == "Running" for one in self.groups.values()) >= self.quota:
            raise Refusal(403, "QuotaExceeded", "Living container groups quota exceeded.")
        id_ = f"eci-{len(self.tokens):04}"
        folder = Path(self._folder) / id_
        folder.mkdir()
        group = self.groups[id_] = Group(id_, dict(asked), folder)
        self.tokens[token] = id_
        if self.runs:
            group.start()
        return id_

    def _page(self, asked: Mapping[str, str]) -> dict[str, Any]:
        wanted = [{"Key": key, "Value": value} for key, value in _pairs(asked, "Tag")]
        found = [group.view() for group in self.groups.values() if all(one in group.tags for one in wanted)]
        begin, limit = int(asked.get("NextToken", 0)), int(asked.get("Limit", 20))
        more = {"NextToken": str(begin + limit)} if len(found) > begin + limit else {}
        return {"ContainerGroups": found[begin : begin + limit], "TotalCount": len(found), **more}


def _values(asked: Mapping[str, str], name: str) -> list[str]:
    found: list[str] = []
    while (one := asked.get(f"{name}.{len(found) + 1}")) is not None:
        found.append(one)
    return found


def _pairs(asked: Mapping[str, str], name: str) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    while (key := asked.get(f"{name}.{len(found) + 1}.Key")) is not None:
        found.append((key, asked.get(f"{name}.{len(found) + 1}.Value", "")))
    return found


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1
    disable_nagle_algorithm = True
    owner: GroupServer

    def do_POST(self) -> None:
        owner = self.owner
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        action = self.headers.get("x-acs-action", "")
        faults = owner.faults.get(action)
        fault = faults.popleft() if faults else Fault()
        try:
            owner.check(self.command, self.path, self.headers, body)
            if fault.status:
                raise Refusal(fault.status, fault.code)
            asked = dict(parse_qsl(self.path.partition("?")[2], keep_blank_values=True))
            status, answer = 200, owner.serve(action, asked)
        except Refusal as refusal:
            status, answer = refusal.status, {"Code": refusal.code, "Message": refusal.message}
        owner.log.append((action, status))
        if fault.lose:
            self.close_connection = True
            return
        text = json.dumps({"RequestId": "1-2-3", **answer}).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *arguments: Any) -> None:
        pass
