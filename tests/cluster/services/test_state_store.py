"""Every state store keeps what it was given, also through the death of the process that gave it."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from tests.new_process import interpreter
from tests.redis_server import RedisServer
from torch_dpflow.cluster.services.state_store import SQLiteStore, StateStore, open_store
from torch_dpflow.errors import OptionError, StateError


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    """A Redis server of our own."""
    server = RedisServer(tmp_path)
    server.start()
    yield server
    server.stop()


@pytest.fixture(params=["sqlite", "redis"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where a store is: each kind in turn."""
    if request.param == "sqlite":
        return f"sqlite://{tmp_path}/state"
    server: RedisServer = request.getfixturevalue("redis")
    return server.url


@pytest.fixture
def opened(url: str) -> Iterator[Callable[[], StateStore]]:
    """Open the store, as often as wanted."""
    stores: list[StateStore] = []

    def open_again() -> StateStore:
        stores.append(open_store(url))
        return stores[-1]

    yield open_again
    for store in stores:
        store.close()
        store.close()


def test_what_was_put_is_there_and_what_was_deleted_is_not(opened: Callable[[], StateStore]) -> None:
    store = opened()
    assert store.items() == {}
    names = ["flow/a", "flow/b*", "flow/b[1]", "flow/b?", "flowers", "blob/ä\\_%"]
    for name in names:
        store.write(name, b"\x00\xff")
    store.write("flow/a", b"later")
    store.write("flowers", b"")
    assert store.items() == {**dict.fromkeys(names, b"\x00\xff"), "flow/a": b"later", "flowers": b""}
    for _ in range(2):
        store.write("flow/b*", None)
    assert store.items().keys() == {*names} - {"flow/b*"}


def test_a_large_value_comes_back(opened: Callable[[], StateStore]) -> None:
    value = os.urandom(1 << 20) * 17
    store = opened()
    store.write("blob", value)
    assert store.items() == {"blob": value}


def test_a_new_process_finds_what_another_had_put_before_it_was_killed(
    url: str, opened: Callable[[], StateStore]
) -> None:
    program = (
        "import os, signal, sys\n"
        "from torch_dpflow.cluster.services.state_store import open_store\n"
        "store = open_store(sys.argv[1])\n"
        "store.write('flow/a', b'kept')\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    with interpreter(program, url) as process:
        assert process.communicate(timeout=250) == ("", "")
    assert opened().items() == {"flow/a": b"kept"}


def test_a_store_that_is_no_store_says_so(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("this is not a database " * 100)
    with pytest.raises(StateError, match=r"give the path of one that .* has made, or of no file"):
        open_store(str(tmp_path / "text"))
    with pytest.raises(StateError, match="cannot be used"):
        open_store(str(tmp_path / "no" / "folder"))
    with pytest.raises(OptionError, match="give a path, sqlite:"):
        open_store("etcd://host")


def test_a_closed_store_says_so_and_its_file_is_the_owners(tmp_path: Path) -> None:
    store = SQLiteStore(tmp_path / "state")
    assert stat.S_IMODE(os.stat(tmp_path / "state").st_mode) == 0o600
    store.close()
    with pytest.raises(StateError, match="is closed"):
        store.items()


def test_a_server_that_is_not_there_is_told_without_its_password(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="is it up") as caught:
        open_store("redis://user:secret@127.0.0.1:1/0")
    assert "secret" not in str(caught.value)


def test_a_server_is_one_owners_until_he_lets_go_or_is_silent(redis: RedisServer) -> None:
    with closing(open_store(redis.url)) as one, closing(open_store(redis.url)) as two:
        one.claim("one")
        assert one.renew("one")
        with pytest.raises(StateError, match="another cluster keeps its flows in the state store 'unix:"):
            two.renew("two")
        two.release("two")
        with ThreadPoolExecutor() as pool:
            # Who lives has renewed it before its lease, which the other watches, ends.
            claim = pool.submit(two.claim, "two")
            while not claim.done():
                assert one.renew("one")
        with pytest.raises(StateError, match=r"give another one, or another of its databases: redis://"):
            claim.result()
        one.release("one")
        two.claim("two")
        one.write("kept", b"")
        two.write("torch_dpflow-owner", None)  # no key of a user's
        with pytest.raises(StateError, match="another cluster"):
            one.renew("one")


def test_a_server_whose_owner_was_killed_is_free_in_the_end(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(open_store(redis.url)) as one, closing(open_store(redis.url)) as two:
        with monkeypatch.context() as short:
            short.setattr("torch_dpflow.cluster.services.state_store._LEASE_MS", 300)
            one.claim("one")
        two.claim("two")
        with pytest.raises(StateError, match="another cluster"):
            one.renew("one")


def test_a_store_that_was_emptied_is_claimed_anew(redis: RedisServer) -> None:
    with closing(open_store(redis.url)) as store:
        store.claim("one")
        redis.stop()
        with pytest.raises(StateError, match="is it up"):
            store.renew("one")
        redis.start()
        assert not store.renew("one")
        assert store.renew("one")
