"""Whatever a command of a cluster is given, it answers with a line that helps, never with a traceback."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.cluster_command import CommandedCluster
from tests.new_process import interpreter
from tests.shared_cluster import free_port
from tests.worker_cases import has_ended
from torch_dpflow.cli.main import root
from torch_dpflow.cluster.security.connection_file import NODE_SOCKET, generate_keys, write_connection_file

COMMANDS = [["status"], ["top"], ["down"], ["flow", "list"], ["flow", "show", "x"], ["flow", "delete", "x"]]
COMMANDS.append(["flow", "scale", "x", "--shards", "2"])


def run(*arguments: str) -> Result:
    return CliRunner().invoke(root, [*arguments], env={"COLUMNS": "300", "DPFLOW_ADDRESS": ""})


def refused(result: Result, message: str, *, code: int = 1) -> None:
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == code, result.output
    assert message in result.output
    assert "Traceback" not in result.output
    last = [line for line in result.output.splitlines() if line.startswith("Error: ")]
    assert len(last) == 1, result.output


def test_a_name_that_is_no_text_is_refused(taken: int) -> None:
    arguments = ("flow", "scale", "a\udcff", "--shards", "2")
    refused(
        run(*arguments, "--address", f"tcp://127.0.0.1:{taken}"), "'a\\udcff' cannot be sent: surrogates not allowed"
    )


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that somebody has."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def gone(tmp_path: Path) -> str:
    """The connection file of a cluster that was killed."""
    path = tmp_path / "gone"
    write_connection_file(path, generate_keys(f"ipc://{tmp_path}/none"))
    return str(path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workers", "0"], "0 is not in the range 1<=x<=4096"),
        (["--workers", "-1"], "-1 is not in the range"),
        (["--workers", "many"], "'many' is not a valid integer"),
        (["--memory", "12XB"], "'12XB' is no size; give bytes with their unit, such as 8GiB or 500MB"),
        (["--memory", ""], "'' is no size"),
        (["--memory", "-1GiB"], "'-1GiB' is no size"),
        (["--log-format", "xml"], "'xml' is not one of"),
        (["--log-level", "loud"], "'loud' is not one of"),
        (["extra"], "unexpected extra argument"),
        (["--unknown"], "No such option"),
    ],
)
def test_up_refuses_what_is_no_value(arguments: list[str], message: str) -> None:
    refused(run("up", *arguments), message, code=2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--memory", "1kB"], "--memory=1000 is out of range; give an int from 1048576 to"),
        (["--memory", "1000TiB"], "is more than this process can have"),
        (["--listen", "nonsense"], "must be tcp://ADDRESS:PORT"),
        (["--listen", "tcp://127.0.0.1"], "must be tcp://ADDRESS:PORT"),
        (["--listen", "tcp://127.0.0.1:0"], "must be tcp://ADDRESS:PORT"),
        (["--listen", "tcp://127.0.0.1:99999"], "must be tcp://ADDRESS:PORT"),
        (["--listen", "tcp://*:5555"], "must be tcp://ADDRESS:PORT"),
        (["--listen", "tcp://[::1:5555"], "--listen 'tcp://[::1:5555': must be tcp://ADDRESS:PORT"),
        (["--listen", "tcp://127.0.0.1:5555/path"], "must be tcp://ADDRESS:PORT"),
        (["--listen", "tcp://user@127.0.0.1:5555"], "must be tcp://ADDRESS:PORT"),
        (["--listen", "tcp://0.0.0.0:5555"], "give the address of this host by which jobs reach it"),
        (["--listen", "tcp://192.0.2.1:5555"], "give another address"),
        (["--metrics", "9400"], "give HOST:PORT"),
        (["--metrics", "127.0.0.1:0"], "give HOST:PORT"),
        (["--metrics", "127.0.0.1:99999"], "give HOST:PORT"),
        (["--metrics", "0.0.0.0:9400"], "--metrics-public"),
        (["--metrics", "nowhere.invalid:9400"], "--metrics-public"),
        (["--web", "8265"], "give HOST:PORT, such as 127.0.0.1:8265"),
        (["--web", "0.0.0.0:8265"], "--web-token-file"),
        (["--web", "127.0.0.1:8265", "--web-token-file", "/none"], "No such file"),
        (["--metrics", "nowhere.invalid:9400", "--metrics-public"], "give another"),
        (
            ["--keys", "/none/keys"],
            "--keys '/none/keys' without --listen: keys are",
        ),
        (
            ["--web-token-file", "token"],
            "--web-token-file without --web: give --web HOST:PORT too, or leave it out",
        ),
        (
            ["--metrics-public"],
            "--metrics-public without --metrics: give --metrics HOST:PORT too, or leave it out",
        ),
        (["--state", "/none/state"], "cannot be used"),
        (["--state", "/"], "cannot be used"),
        (["--state", "ftp://x"], "give a path, sqlite:///PATH, redis://HOST:PORT/NUMBER"),
        (["--state", "redis://:secret@127.0.0.1:1/0"], "cannot be used"),
        (["--state", "redis://:secret@127.0.0.1:abc/0"], "--state 'redis://127.0.0.1:abc/0'"),
        (["--state", "redis://:secret@[::1"], "--state 'redis://[::1': give a path"),
        (["--state", "redis://:secret@127.0.0.1:1/0?nope=1"], "give redis://HOST:PORT/NUMBER"),
    ],
)
def test_up_refuses_what_it_cannot_have(arguments: list[str], message: str, tmp_path: Path) -> None:
    result = run("up", "--address", str(tmp_path / "connection"), *arguments)
    refused(result, message)
    assert "secret" not in result.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "key file '{}': No such file or directory; give one that `dpflow keygen` has written"),
        (
            b'{"address": ',
            "key file '{}' is not a valid one, or damaged: Input data was truncated; write another",
        ),
    ],
)
def test_up_refuses_keys_that_are_none(content: bytes | None, message: str, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    if content is not None:
        keys.write_bytes(content)
        keys.chmod(0o600)
    listen = ["--listen", f"tcp://127.0.0.1:{free_port()}", "--address", str(tmp_path / "connection")]
    refused(run("up", *listen, "--keys", str(keys)), message.format(keys))


def test_up_advises_nobody_to_remove_a_file_that_is_no_state(tmp_path: Path) -> None:
    path = tmp_path / "thesis.txt"
    path.write_text("years of work, " * 100)
    result = run("up", "--address", str(tmp_path / "connection"), "--state", str(path))
    refused(result, "give the path of one that `dpflow up --state` has made")
    assert "remove" not in result.output


def test_up_refuses_a_connection_file_that_it_cannot_write(tmp_path: Path) -> None:
    refused(run("up", "--address", str(tmp_path / "none" / "file")), "No such file or directory")
    refused(run("up", "--address", str(tmp_path)), f"'{tmp_path}' is a directory; give a file in it")


def test_no_pipe_or_socket_is_waited_for_as_a_file_of_keys(tmp_path: Path) -> None:
    pipe, path = tmp_path / "pipe", tmp_path / "socket"
    os.mkfifo(pipe, 0o600)
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))
        listen = ["--listen", f"tcp://127.0.0.1:{free_port()}", "--address", str(tmp_path / "file")]
        for given in (pipe, path):
            for arguments in (
                ["status", "--address", str(given)],
                ["up", "--address", str(given)],
                ["up", *listen, "--keys", str(given)],
            ):
                refused(run(*arguments), f"file '{given}' is a pipe, socket or device; give a regular file")


def test_up_refuses_a_limit_of_open_files_that_allows_no_worker(tmp_path: Path) -> None:
    connection = tmp_path / "connection"
    arguments = ["up", "--address", str(connection)]
    program = f"from torch_dpflow.cli.main import root; root({arguments!r})"
    with interpreter(program, prefix=["prlimit", "--nofile=79:79"]) as process:
        _, said = process.communicate(timeout=250)
    assert process.returncode == 1
    assert "Error: too many open files: a cluster needs a limit of 80 for its first worker" in said
    assert "is 79 (`ulimit -n`). The hard limit is the same" in said
    assert not connection.exists()


@pytest.mark.parametrize("option", ["--listen", "--metrics", "--web"])
def test_up_refuses_a_port_that_is_taken(option: str, taken: int, tmp_path: Path) -> None:
    scheme = "tcp://" if option == "--listen" else ""
    connection = str(tmp_path / "connection")
    result = run("up", "--address", connection, option, f"{scheme}127.0.0.1:{taken}")
    refused(result, "Address already in use")


def test_up_writes_over_no_file_that_is_not_its_own(tmp_path: Path) -> None:
    path = tmp_path / "thesis.txt"
    path.write_text("years of work")
    path.chmod(0o600)
    refused(run("up", "--address", str(path)), "is not a valid one")
    assert path.read_text() == "years of work"


def test_a_second_cluster_does_not_take_the_place_of_the_first_which_ends_its_fork_server(
    tmp_path: Path,
) -> None:
    first = CommandedCluster.up(tmp_path, "--state", str(tmp_path / "state"))
    try:
        fork_server = first.fork_server()
        state = ["--state", str(tmp_path / "state"), "--address", str(tmp_path / "other")]
        refused(run("up", *state), "another cluster stores its flows there")
        assert stat.S_IMODE((tmp_path / "state").stat().st_mode) == 0o600
        content = Path(first.address).read_text()
        refused(run("up", "--address", first.address), "a cluster is up already at ipc://")
        assert Path(first.address).read_text() == content
        for arguments, message in (
            (["flow", "show", "../.."], "flow '../..' is not registered; registered are []"),
            (["flow", "delete", ""], "flow '' is not registered"),
            (["flow", "delete", "x" * 70_000], "Error: flow 'xxx"),
            (["flow", "scale", "a b", "--shards", "2"], "flow 'a b' is not registered"),
        ):
            refused(run(*arguments, "--address", first.address), message)
    finally:
        first.stop()
    assert has_ended(fork_server)


@pytest.mark.parametrize("command", [*COMMANDS, ["workers"]], ids=" ".join)
@pytest.mark.parametrize("scheme", ["tcp", "ipc", "left behind"])
def test_where_nothing_listens_no_command_waits(
    command: list[str], scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch_dpflow.cli.cluster_views.ANSWER_S", 10.0**6)
    address = f"tcp://127.0.0.1:{free_port()}" if scheme == "tcp" else f"ipc://{tmp_path}/coordinator"
    if scheme == "left behind":  # by processes that were killed
        for name in ("coordinator", NODE_SOCKET):
            with socket.socket(socket.AF_UNIX) as killed:
                killed.bind(str(tmp_path / name))
    refused(run(*command, "--address", address), f"nothing listens at {address}; is the cluster up?")


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file or directory; is the cluster up? Start one by `dpflow up`"),
        (b"", "truncated; give the one that `dpflow up` has written"),
        (b"\x00\xff garbage", "is not a valid one"),
        (
            b'{"address": "ipc:///x", "server_public": "x", "client_public": "x", "client_secret": "x"}',
            "40 bytes",
        ),
    ],
)
def test_a_connection_file_that_is_none_is_told(
    command: list[str], content: bytes | None, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "connection"
    if content is not None:
        path.write_bytes(content)
        path.chmod(0o600)
    refused(run(*command, "--address", str(path)), message)


def test_a_connection_file_that_others_may_read_is_not_used(gone: str) -> None:
    os.chmod(gone, 0o644)
    refused(run("status", "--address", gone), "others must not read it (chmod 600;")


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("", "is the cluster up?"),
        ("/", "connection file '/' is a directory; give a file in it"),
        ("tcp://192.0.2.1:5555", "give the connection file"),
        ("tcp://127.0.0.1:99999", "address='tcp://127.0.0.1:99999'"),
        ("tcp://127.0.0.1", "address='tcp://127.0.0.1'"),
        ("tcp://[::1", "address='tcp://[::1': give the path of a connection file"),
        ("tcp://127.0.0.1:5555/path", "address='tcp://127.0.0.1:5555/path': give the path"),
        ("/dev/null", "connection file '/dev/null' is a pipe, socket or device; give a regular file"),
        ("smoke://signals", "address='smoke://signals'"),
        ("ipc://" + "x" * 200, "address='ipc://xxx"),
    ],
)
def test_an_address_that_is_none_is_told(address: str, message: str) -> None:
    refused(run("status", "--address", address), message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["top", "--interval", "-1"], "give seconds from 0 to 86400"),
        (["top", "--interval", "nan"], "give seconds from 0 to 86400"),
        (["top", "--interval", "soon"], "'soon' is not a valid float"),
        (["top", "--count", "0"], "0 is not in the range x>=1"),
        (["flow", "scale", "x"], "give --shards, --workers or both"),
        (["flow", "scale", "x", "--shards", "0"], "'0': give a number from 1 to 256, or \"auto\""),
        (["flow", "scale", "x", "--shards", "1", "--workers", "-3"], "-3 is not in the range"),
        (["flow", "show"], "Missing argument 'NAME'"),
        (["keygen"], "Missing argument 'PATH'"),
        (["keygen", "/"], "is a directory"),
        (["no-such-command"], "No such command 'no-such-command'. There are cache, check, dataset, deploy, down"),
        (["statsu"], "No such command 'statsu'. Did you mean 'status'?"),
        (["swep", "--json"], "Did you mean 'sweep'?"),
    ],
)
def test_arguments_that_are_none_are_told(arguments: list[str], message: str) -> None:
    refused(run(*arguments), message, code=2)


def test_keys_are_not_written_where_nothing_can_be(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "none")
    refused(run("keygen", str(tmp_path / "link")), "exists already")
    refused(run("keygen", ""), "PATH is empty")
    refused(run("keygen", str(tmp_path / "none" / "keys")), "cannot be written: No such file or directory")


def test_keys_stay_out_of_sight(tmp_path: Path) -> None:
    result = run("keygen", str(tmp_path / "keys"), "--json")
    assert result.exit_code == 0
    listen = ["--listen", f"tcp://127.0.0.1:{free_port()}", "--keys", str(tmp_path / "keys")]
    cluster = CommandedCluster.up(tmp_path, *listen, "--log-level", "debug")
    try:
        connection = Path(cluster.address)
        assert stat.S_IMODE(connection.stat().st_mode) == 0o600
        secrets = [word for word in connection.read_text().split('"') if len(word) == 40]
        assert len(secrets) == 4
        pids = [cluster.pid, *(view.pid for view in cluster.processes())]
        seen = [result.output, cluster.log.read_text(), str(cluster.facts), run("status").output]
        for pid in pids:
            seen += [Path(f"/proc/{pid}/{name}").read_bytes().decode() for name in ("cmdline", "environ")]
        assert not [text for text in seen for secret in secrets if secret in text]
    finally:
        cluster.stop()
