"""What names a cluster, and what does not."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from torch_dpflow import DPFlowDataLoader
from torch_dpflow.cluster.security.connection_file import (
    ADDRESS_VARIABLE,
    default_connection_file,
    find_cluster,
    generate_keys,
    write_connection_file,
)
from torch_dpflow.errors import OptionError, OptionTypeError


@pytest.fixture
def connection(tmp_path: Path) -> Path:
    path = tmp_path / "connection"
    write_connection_file(path, generate_keys("ipc:///somewhere"))
    return path


def test_a_connection_file_is_found_by_its_path_and_by_the_environment(
    connection: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ADDRESS_VARIABLE, str(connection))
    for address in (connection, str(connection), "auto", None):
        assert find_cluster(address).address == "ipc:///somewhere"


@pytest.mark.parametrize("address", ["ipc:///a/socket", "tcp://127.0.0.1:5555", "tcp://[::1]:5555"])
def test_a_service_on_this_host_takes_no_keys(address: str) -> None:
    assert find_cluster(address).address == address


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("tcp://192.0.2.1:5555", "reaches beyond this host"),
        ("tcp://127.example.org:5555", "reaches beyond this host"),
        ("tcp://127.0.0.1", "give the path of a connection file"),
        ("tcp://127.0.0.1:0", "give the path of a connection file"),
        ("tcp://127.0.0.1:70000", "give the path of a connection file"),
        ("ipc://", "give the path of a connection file"),
        ("ipc://" + "x" * 108, "at most 107 bytes"),
        ("https://example.org:1", "give the path of a connection file"),
        ("", "is the cluster up"),
        ("/no/such/file", "is the cluster up"),
        ("nul\0byte", "null byte"),
        ("sur\ud800rogate", "surrogates not allowed; no path has"),
    ],
)
def test_what_names_no_cluster_is_refused(address: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        find_cluster(address)


def test_what_is_no_path_is_refused_when_the_loader_is_made() -> None:
    with pytest.raises(OptionError, match="null byte"):
        DPFlowDataLoader(range(3), flow="a/b", address="\0")


@pytest.mark.parametrize("address", [3, b"auto", ["auto"], True])
def test_an_address_is_text_or_a_path(address: Any) -> None:
    with pytest.raises(OptionTypeError, match='give "auto" or the path'):
        find_cluster(address)
    with pytest.raises(OptionTypeError, match="address="):
        iter(DPFlowDataLoader(range(4), flow="f", address=address))


@pytest.mark.parametrize("flow", ["../..", "", "a b", "/etc", "x" * 101, "-x", 3])
def test_a_flow_has_a_name_of_few_characters(flow: Any, connection: Path) -> None:
    with pytest.raises((OptionError, OptionTypeError), match="flow="):
        iter(DPFlowDataLoader(range(4), flow=flow, address=str(connection)))


def test_a_cluster_of_another_login_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ADDRESS_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "login"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(OptionError, match=r"login/dpflow-connection-\d+.json' or .*is the cluster up") as caught:
        find_cluster()
    assert isinstance(caught.value.__cause__, FileNotFoundError)

    other = tmp_path / "dpflow-connection-987654321.json"
    other.touch()
    with pytest.raises(OptionError, match="json' belongs to the cluster of another user"):
        find_cluster()

    write_connection_file(tmp_path / f"dpflow-connection-{os.getuid()}.json", generate_keys("ipc:///temporary"))
    assert find_cluster().address == "ipc:///temporary"
    (tmp_path / "login").mkdir()
    write_connection_file(default_connection_file(), generate_keys("ipc:///login"))
    assert find_cluster().address == "ipc:///login"


def test_a_cluster_without_a_login_as_in_a_container_is_written_where_it_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.delenv(ADDRESS_VARIABLE, raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    write_connection_file(default_connection_file(), generate_keys("ipc:///here"))
    assert find_cluster().address == "ipc:///here"


def test_the_cluster_of_another_user_is_refused_as_such(connection: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.getuid() == 0:  # which reads all files, and trusts its own
        os.chown(connection, 65534, -1)
    else:
        monkeypatch.setattr(os, "getuid", lambda: connection.stat().st_uid + 1)
    with pytest.raises(OptionError, match=r"belongs to user \d+; a cluster is for the user who started it"):
        find_cluster(connection)


def test_a_connection_file_that_cannot_be_read_is_refused_as_such(
    connection: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(path: Any, flags: int) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    monkeypatch.setattr(os, "open", denied)  # root reads all files
    with pytest.raises(OptionError, match="Permission denied; a cluster is for the user who started it"):
        find_cluster(connection)
