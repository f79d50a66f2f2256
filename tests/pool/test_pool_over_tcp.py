"""A pool that is reached over tcp: who is let in, what others are told, and servers that are cut off."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.datasets.samples_source import numbers, publish
from tests.pool.pool_servers import inner_server, server
from tests.shared_cluster import PATIENCE_S, wait
from torch_dpflow import PooledDataset
from torch_dpflow.cli.main import root
from torch_dpflow.cluster.security.connection_file import generate_keys, write_connection_file
from torch_dpflow.datasets import DatasetStore, StoredDataset
from torch_dpflow.errors import OptionError, OptionTypeError, PeerLostError
from torch_dpflow.pool import DataClient, DataServer
from torch_dpflow.pool.transport.address import PoolAddress, find_address

COUNT = 40
OURS, OTHERS, OLD = (
    generate_keys("", certificates=True),
    generate_keys("", certificates=True),
    generate_keys(""),
)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the keys of this cluster, of another, and some without certificates."""
    folder = tmp_path_factory.mktemp("keys")
    for name, file in {"ours": OURS, "others": OTHERS, "old": OLD, "jobs": OURS.for_jobs()}.items():
        write_connection_file(folder / name, file)
    return folder


@contextmanager
def tcp_server(folder: Path, keys: Path, *, trust_network: bool) -> Iterator[PoolAddress]:
    """A server in a thread whose memory nobody can map, and where clients with its keys find it."""
    listen = find_address("tcp://127.0.0.1:0", keys / "ours", trust_network=trust_network)
    with inner_server(folder / "p", 1 << 20, listen=listen) as serving:
        assert serving.address is not None
        (folder / "p").rename(folder / "q")  # as in another container
        yield find_address(serving.address, keys / "ours", trust_network=trust_network)


@pytest.mark.parametrize("trust_network", [False, True])
def test_who_has_the_keys_reads_and_others_are_told_why_not(
    stored: StoredDataset, keys: Path, tmp_path: Path, trust_network: bool
) -> None:
    with tcp_server(tmp_path, keys, trust_network=trust_network) as address:

        def told(file: str, trusts: bool) -> str:
            with pytest.raises(PeerLostError) as caught:
                DataClient(str(address), connection=keys / file, trust_network=trusts).cached_datasets()
            assert isinstance(caught.value, OptionError), "so that jobs that read storage instead warn of it"
            return str(caught.value)

        assert "of this cluster's servers" in told("others", False) if not trust_network else True
        assert "it has another key" in told("others", True) if trust_network else True
        assert ("speak TLS" if trust_network else "speaks TLS") in told("ours", not trust_network)
        with closing(
            DataClient(str(address), connection=keys / "jobs", trust_network=trust_network, silence_s=PATIENCE_S)
        ) as client:
            client.preload(stored)
            assert client.read_batch(stored, [*range(COUNT)]) == numbers(COUNT)
            assert client.dataset(stored).misses == 0
            assert [one.readers for one in client.cached_datasets()] == [1]
            client.unload(stored)
            assert client.cached_datasets() == []
            assert client.read_batch(stored, [*range(COUNT)]) == numbers(COUNT)
            assert client.dataset(stored).misses == COUNT


def test_what_cannot_be_kept_from_unauthenticated_peers_is_refused(
    stored: StoredDataset, keys: Path, tmp_path: Path
) -> None:
    with pytest.raises(OptionError, match=r"give the file that `dpflow keygen` has written"):
        DataServer(1 << 20, tmp_path / "p", listen=find_address("tcp://0.0.0.0:0"))
    with pytest.raises(OptionError, match=r"pip install 'torch_dpflow\[pool\]'"):
        DataServer(1 << 20, tmp_path / "p", listen=find_address("tcp://0.0.0.0:0", keys / "old"))
    for host in ("0.0.0.0", "[::]", "0"):
        with pytest.raises(OptionError, match="other hosts connect to this address; give one of this host"):
            DataServer(1 << 20, tmp_path / "p", listen=find_address(f"tcp://{host}:0", keys / "ours"))
    leader, own = (find_address(f"tcp://{host}:7070", keys / "ours") for host in ("192.0.2.1", "127.0.0.1"))
    with pytest.raises(OptionError, match="must listen on it too; give it an address, --listen"):
        DataServer(1 << 20, tmp_path / "p", join=leader)
    with pytest.raises(OptionError, match=r"the pool at tcp://192.0.2.1:7070 and its readers cannot reach it"):
        DataServer(1 << 20, tmp_path / "p", join=leader, listen=own)
    with pytest.raises(OptionError, match="no certificate for servers"):
        DataServer(1 << 20, tmp_path / "p", listen=find_address("tcp://127.0.0.1:0", keys / "jobs"))
    with pytest.raises(OptionError, match="give the file"):
        PooledDataset(stored, "tcp://127.0.0.1:1")
    with pytest.raises(OptionError, match="tcp://HOST:PORT"):
        PooledDataset(stored, "tcp://127.0.0.1", connection=keys / "ours")
    with pytest.raises(OptionTypeError, match="trust_network"):
        PooledDataset(stored, "tcp://127.0.0.1:1", connection=keys / "ours", trust_network="no")  # type: ignore[arg-type]
    (keys / "damaged").write_text((keys / "ours").read_text().replace("BEGIN CERT", "BEGIN CART"))
    (keys / "damaged").chmod(0o600)
    with pytest.raises(OptionError, match="cannot be read"):
        PooledDataset(stored, "tcp://127.0.0.1:1", connection=keys / "damaged")


def test_commands_over_tcp(stored: StoredDataset, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    assert CliRunner().invoke(root, ["keygen", str(file)]).exit_code == 0
    more = ("--listen", "tcp://127.0.0.1:0", "--connection", str(file))
    with server(tmp_path / "p", more=more) as process:
        address = process.said.rpartition(" and at ")[2].partition(",")[0]

        def run(*words: str) -> str:
            options = ["--address", address, "--connection", str(file)]
            result = CliRunner().invoke(root, ["pool", *words, *options])
            assert result.exit_code == 0, result.output
            return result.output

        store = stored.url.removesuffix("/core/numbers")
        assert f"{COUNT} of {COUNT} samples" in run("preload", "core/numbers:v1:train", "--store", store)
        assert "until unloaded" in run("list")
        assert f"{COUNT} samples are in memory as in storage" in run(
            "verify", "core/numbers:v1:train", "--store", store
        )
        assert "unloaded" in run("unload", "core/numbers")
        client = PooledDataset(stored, address, connection=file, silence_s=PATIENCE_S)
        with closing(client):
            wait(lambda: client.read_each(range(COUNT)) == numbers(COUNT) and client.hits > 0)
            os.kill(process.pid, signal.SIGKILL)
            assert client.read_each(range(COUNT)) == numbers(COUNT)


class Relay:
    """Hands connections on to a server, and after so many bytes of it cuts, freezes or damages them."""

    def __init__(self, target: PoolAddress, after: int, fault: str) -> None:
        self._target, self._after, self._fault = target, after, fault
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = [self._listener]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()
        self.address = target.at(f"tcp://127.0.0.1:{self._listener.getsockname()[1]}")
        #: Bytes that it has handed on to readers.
        self.passed = 0

    def close(self) -> None:
        for one in self._open:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for one in self._open:
            one.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection((self._target.host, self._target.port))
                self._open += [near, far]
                for act in (lambda a=near, b=far: self._up(a, b), lambda a=near, b=far: self._down(a, b)):
                    self._threads.append(threading.Thread(target=act))
                    self._threads[-1].start()

    def _up(self, near: socket.socket, far: socket.socket) -> None:
        with suppress(OSError):
            while content := near.recv(1 << 16):
                far.sendall(content)
            far.shutdown(socket.SHUT_WR)

    def _down(self, near: socket.socket, far: socket.socket) -> None:
        with suppress(OSError):
            while content := far.recv(1 << 16):
                room = self._after - self.passed
                if room < len(content) and self._fault == "damage":
                    at = max(0, room)
                    content = content[:at] + bytes([content[at] ^ 0x41]) + content[at + 1 :]
                    self._after = 1 << 60
                elif room < len(content):
                    self.passed += len(content)
                    near.sendall(content[: max(0, room)])
                    if self._fault == "freeze":
                        continue
                    break
                # Counted first: a reader that has all its bytes may compare the count before this thread goes on.
                self.passed += len(content)
                near.sendall(content)
            near.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("is_other", [False, True])
def test_memory_of_a_server_on_this_host_is_mapped_though_it_is_given_as_a_port(
    stored: StoredDataset, keys: Path, tmp_path: Path, is_other: bool
) -> None:
    listen = find_address("tcp://127.0.0.1:0", keys / "ours")
    with inner_server(tmp_path / "p", 1 << 20, listen=listen) as serving:
        other: AbstractContextManager[DataServer] = nullcontext(serving)
        if is_other:  # a directory of the same name, of another server: as in another container
            (tmp_path / "p").rename(tmp_path / "q")
            other = inner_server(tmp_path / "p", 1 << 20)
        address = find_address(str(serving.address), keys / "ours")
        with other, closing(Relay(address, 1 << 60, "")) as relay:
            DataClient(address).preload(stored)
            with closing(PooledDataset(stored, relay.address, silence_s=PATIENCE_S)) as dataset:
                assert dataset.read_each(range(COUNT)) == numbers(COUNT)
                told = relay.passed
                assert dataset.read_each(range(COUNT)) == numbers(COUNT)
                assert (dataset.hits, dataset.misses) == (2 * COUNT, 0)
            samples = sum(len(content) for content, _ in numbers(COUNT))
            assert (relay.passed - told >= samples) is is_other


def total_bytes(stored: StoredDataset, address: PoolAddress) -> int:
    """What a reader of all samples is sent."""
    with closing(Relay(address, 1 << 60, "")) as relay:
        with closing(PooledDataset(stored, relay.address, silence_s=PATIENCE_S)) as dataset:
            assert dataset.read_each(range(COUNT)) == numbers(COUNT)
            assert dataset.hits == COUNT
        return relay.passed


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.slow), 97])
def test_a_data_connection_that_is_cut_at_any_byte_costs_no_sample(
    stored: StoredDataset, keys: Path, tmp_path: Path, step: int
) -> None:
    with tcp_server(tmp_path, keys, trust_network=True) as address:
        DataClient(address, silence_s=PATIENCE_S).preload(stored)
        for after in range(0, total_bytes(stored, address), step):
            with (
                closing(Relay(address, after, "cut")) as relay,
                closing(PooledDataset(stored, relay.address, silence_s=PATIENCE_S)) as dataset,
            ):
                for _ in range(2):
                    assert dataset.read_each(range(COUNT)) == numbers(COUNT)


@pytest.mark.parametrize("copy", [False, True])
def test_a_data_connection_that_is_cut_in_a_large_record_costs_no_sample(
    keys: Path, tmp_path: Path, store: DatasetStore, copy: bool
) -> None:
    large = [(bytes([one]) * 40_000, {"number": one}) for one in range(6)]
    stored = publish(store, large)
    with tcp_server(tmp_path, keys, trust_network=True) as address:
        DataClient(address, silence_s=PATIENCE_S).preload(stored)
        for after in range(30_000, 240_000, 35_000):
            with (
                closing(Relay(address, after, "cut")) as relay,
                closing(PooledDataset(stored, relay.address, silence_s=PATIENCE_S, copy=copy)) as dataset,
            ):
                held = [dataset.read_each(range(6)) for _ in range(2)]
                assert held == [large, large]
                assert dataset.misses


@pytest.mark.parametrize("after", [400, pytest.param(1200, marks=pytest.mark.slow)])
def test_a_server_that_falls_silent_costs_a_wait_and_no_sample(
    stored: StoredDataset, keys: Path, tmp_path: Path, after: int
) -> None:
    with tcp_server(tmp_path, keys, trust_network=True) as address:
        DataClient(address, silence_s=PATIENCE_S).preload(stored)
        with (
            closing(Relay(address, after, "freeze")) as relay,
            closing(PooledDataset(stored, relay.address, silence_s=0.5)) as dataset,
        ):
            for _ in range(2):
                assert dataset.read_each(range(COUNT)) == numbers(COUNT)


@pytest.mark.parametrize("step", [pytest.param(13, marks=pytest.mark.slow), 997])
def test_an_answer_that_names_something_else_is_not_taken(
    stored: StoredDataset, keys: Path, tmp_path: Path, step: int
) -> None:
    """Over TLS, where every byte counts; in plain nobody but the network's owner can change one."""
    with tcp_server(tmp_path, keys, trust_network=False) as address:
        DataClient(address, silence_s=PATIENCE_S).preload(stored)
        for after in range(0, total_bytes(stored, address), step):
            with (
                closing(Relay(address, after, "damage")) as relay,
                closing(PooledDataset(stored, relay.address, silence_s=1.0)) as dataset,
            ):
                assert dataset.read_each(range(COUNT)) == numbers(COUNT)
