"""Who may read the live page: names, tokens, rates; and where it may listen at all."""

from __future__ import annotations

import base64
import os
import stat
from pathlib import Path

import pytest

from tests.shared_cluster import free_port
from torch_dpflow.cluster.monitoring.page_access import (
    BURST,
    MAX_CLIENTS,
    RATE,
    PageAuthenticator,
    PagePlace,
    Refusal,
    check_page,
    digest_of,
)
from torch_dpflow.errors import OptionError

TOKEN = "correct horse battery"


def asked(guard: PageAuthenticator, *, client: str = "c", host: str = "x", login: str = "", method: str = "GET") -> int:
    refusal = guard.refuse(method, client, host, login, 0.0)
    return 200 if refusal is None else refusal.status


def basic(token: str) -> str:
    return "Basic " + base64.b64encode(f"anybody:{token}".encode()).decode()


@pytest.mark.parametrize(
    ("login", "status"),
    [
        ("", 401),
        ("Bearer wrong", 401),
        ("Bearer", 401),
        ("Basic !!!", 401),
        ("Basic /////w==", 401),
        ("Basic \xe9", 401),
        ("Bearer \xe9", 401),
        (f"Digest {TOKEN}", 401),
        (basic(TOKEN[:-1]), 401),
        (basic(TOKEN), 200),
        (f"bearer {TOKEN}", 200),
    ],
)
def test_whoever_has_the_token_reads(login: str, status: int) -> None:
    assert asked(PageAuthenticator(digest_of(TOKEN)), login=login) == status


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:8265", 200),
        ("127.0.0.1", 200),
        ("[::1]:9", 200),
        ("LOCALHOST:1", 200),
        ("10.0.0.1:8265", 421),
        ("evil.example:8265", 421),
        ("", 421),
        ("localhost.evil.example", 421),
        ("127.0.0.1:8265.evil.example", 421),
    ],
)
def test_without_a_token_no_other_name_leads_here(host: str, status: int) -> None:
    assert asked(PagePlace("127.0.0.1", 8265).authenticator, host=host) == status


def test_nothing_but_reading_is_answered() -> None:
    guard = PagePlace("127.0.0.1", 8265).authenticator
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "TRACE"):
        assert asked(guard, host="localhost", method=method) == 405


def test_each_address_has_a_rate_of_its_own() -> None:
    guard = PageAuthenticator()
    answers = [guard.refuse("GET", "busy", "", "", 0.0) for _ in range(int(BURST) + 5)]
    assert [one is None for one in answers] == [True] * int(BURST) + [False] * 5
    assert isinstance(answers[-1], Refusal)
    assert answers[-1].status == 429
    assert guard.refuse("GET", "other", "", "", 0.0) is None
    later = [guard.refuse("GET", "busy", "", "", 1.0) for _ in range(int(RATE) + 1)]
    assert [one is None for one in later] == [True] * int(RATE) + [False]
    for number in range(MAX_CLIENTS + 10):
        guard.refuse("GET", str(number), "", "", 1.0)
    assert guard.refuse("GET", "busy", "", "", 1.0) is None, "it was forgotten"


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(TOKEN + "\n")
    path.chmod(0o600)
    return path


def test_this_machine_has_several_names() -> None:
    for name in ("localhost", "LocalHost", "127.0.0.2", "[::1]"):
        place = check_page("web", f"{name}:8265", None, vacant=False)
        assert asked(place.authenticator, host=place.url.removeprefix("http://")) == 200


def test_beyond_this_machine_a_token_is_needed(token_file: Path) -> None:
    with pytest.raises(OptionError, match=r"reaches beyond this machine.*--web-token-file"):
        check_page("web", f"0.0.0.0:{free_port()}", None)
    place = check_page("web", f"0.0.0.0:{free_port()}", str(token_file))
    assert place.digest == digest_of(TOKEN)
    assert TOKEN not in repr(place)
    assert asked(place.authenticator, host="any.example") == 401
    assert asked(place.authenticator, host="any.example", login=basic(TOKEN)) == 200


@pytest.mark.parametrize(
    "address",
    [
        *(
            "8265",
            "127.0.0.1",
            "127.0.0.1:0",
            "127.0.0.1:65536",
            "127.0.0.1:" + "9" * 5000,
            ":80",
            "a:b",
            "a:²",
        ),
        *("http://127.0.0.1:8265", f"{'a' * 64}:80", "a..b:80", " 127.0.0.1:80x", "[::1", "localhost:1:2"),
    ],
)
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(OptionError, match=r"give HOST:PORT, such as 127\.0\.0\.1:8265"):
        check_page("web", address, None)


def test_a_token_that_others_read_or_could_guess_is_refused(token_file: Path, tmp_path: Path) -> None:
    def refused(message: str, path: Path = token_file) -> None:
        with pytest.raises(OptionError, match=message) as caught:
            check_page("web", f"127.0.0.1:{free_port()}", str(path))
        assert TOKEN not in str(caught.value)

    token_file.chmod(0o640)
    refused("can be read by others: make it yours, and chmod 600")
    token_file.chmod(0o600)
    for content in ("short", "", "x" * 2000, "a token of ünicode letters", "two lines of\na token, no"):
        token_file.write_text(content)
        refused("holds no token: write 16 to 1024 printable characters")
    os.mkfifo(pipe := tmp_path / "pipe", stat.S_IRUSR | stat.S_IWUSR)
    refused("holds no token", pipe)
    refused("No such file", tmp_path / "none")
    refused("Is a directory", tmp_path)
