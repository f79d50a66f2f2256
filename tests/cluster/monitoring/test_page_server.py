"""The live page over real HTTP: what it answers, what it refuses, and how much it takes."""

from __future__ import annotations

import http.client
import json
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.browser import opened
from tests.missing_parts import NO_CHROMIUM, find_chromium
from tests.shared_cluster import wait
from torch_dpflow.cluster.monitoring import page_server
from torch_dpflow.cluster.monitoring.cluster_figures import FlowRow, JobRow, ShardFigures
from torch_dpflow.cluster.monitoring.page_access import PagePlace, digest_of, listen_at
from torch_dpflow.cluster.monitoring.page_figures import Observation, ProcessRow
from torch_dpflow.cluster.monitoring.page_history import PageHistory
from torch_dpflow.cluster.monitoring.page_server import MAX_CONNECTIONS, MAX_HEAD, PageServer

TOKEN = "a token of many letters"
#: What the page shows of what is not known.
DASH = "\N{EN DASH}"


class Served:
    """A page that listens."""

    def __init__(self, digest: bytes = b"") -> None:
        listener = listen_at("127.0.0.1", 0)
        self.port: int = listener.getsockname()[1]
        place = PagePlace("127.0.0.1", self.port, digest)
        self.page = PageServer(listener, place.authenticator, PageHistory("cluster", "here"))
        self.page.start()

    def ask(self, path: str, method: str = "GET", **headers: str) -> tuple[int, http.client.HTTPMessage, bytes]:
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)) as connection:
            connection.request(method, path, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.headers, answer.read()

    def raw(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=60)


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    served: list[Served] = []

    def begin(digest: bytes = b"") -> Served:
        served.append(Served(digest))
        return served[-1]

    yield begin
    for one in served:
        if one.page.serves:
            one.page.close()


def test_it_answers_with_its_files_and_with_what_was_observed(serve: Callable[..., Served]) -> None:
    served = serve()
    assert served.ask("/api/state")[0] == 503, "nothing is known yet"
    served.page.observe(Observation(failure="one"))
    status, headers, body = served.ask("/api/state")
    assert (status, headers["Content-Type"]) == (200, "application/json")
    assert json.loads(body)["failure"] == "one"
    status, headers, page = served.ask("/")
    assert (status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    policy = headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
    assert "unsafe" not in policy
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Cache-Control"] == "no-store"
    assert "Server" not in headers
    assert "Access-Control-Allow-Origin" not in headers
    names = re.findall(r'(?:src|href)="files/([^"]+)"', page.decode())
    assert len(names) == len(set(names)) + 1 == 6, "the icon comes twice"
    for name in {*names, "charts.js"}:
        assert served.ask(f"/files/{name}")[0] == 200, name
    for path in (
        "/files/../page_server.py",
        "/files/%2e%2e%2fpage_server.py",
        "/files/",
        "/files/uPlot.LICENSE",
    ):
        assert served.ask(path)[0] == 404, path
    assert served.ask("/", "HEAD")[2] == b""


def test_no_script_style_or_address_is_in_the_page_itself() -> None:
    """The policy would refuse them, and nothing is to come from elsewhere."""
    folder = Path(page_server.__file__).with_name("page")
    page = (folder / "index.html").read_text()
    assert re.findall(r"<script(?![^>]* src=)|<style|\sstyle=|\son\w+=", page) == []
    texts = [
        path.read_text() for path in folder.iterdir() if path.name in ("index.html", "page.css", "page.js", "charts.js")
    ]
    assert len(texts) == 4
    for text in texts:
        assert re.findall(r"https?://|innerHTML|insertAdjacentHTML|\beval\b|@import|url\(", text) == []
    assert "MIT License" in (folder / "uPlot.LICENSE").read_text()


def test_a_stream_has_all_first_and_then_each_update(serve: Callable[..., Served]) -> None:
    served = serve()
    served.page.observe(Observation(failure="first"))
    with closing(http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)) as connection:
        connection.request("GET", "/api/stream")
        answer = connection.getresponse()
        assert answer.headers["Content-Type"].startswith("text/event-stream")

        def event() -> dict[str, Any]:
            lines = [answer.readline() for _ in range(3)]
            assert lines[2] == b"\n"
            told: dict[str, Any] = json.loads(lines[1].removeprefix(b"data: "))
            assert lines[0] == b"id: %d\n" % told["number"]
            return told

        first = event()
        assert (first["whole"], first["failure"]) == (True, "first")
        for number in range(2, 5):
            served.page.observe(Observation(failure=str(number)))
            update = event()
            assert (update["number"], update["whole"], update["failure"]) == (number, False, str(number))


def test_requests_that_may_not_be_are_refused(serve: Callable[..., Served]) -> None:
    served = serve()
    status, headers, _ = served.ask("/api/state", "POST")
    assert (status, headers["Allow"]) == (405, "GET, HEAD")
    assert headers["Content-Security-Policy"], "refusals have it too"
    assert served.ask("/", Host="evil.example")[0] == 421
    for nonsense in (
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * (2 * MAX_HEAD),
        b"\0\1\2 nonsense\r\n\r\n",
    ):
        with served.raw() as connection:
            assert said(connection, nonsense) in (b"HTTP/1.1 400", b"")
    assert served.ask("/")[0] == 200


def test_only_who_has_the_token_reads(serve: Callable[..., Served]) -> None:
    served = serve(digest_of(TOKEN))
    served.page.observe(Observation())
    for path in ("/", "/files/page.js", "/api/state", "/api/stream"):
        status, headers, body = served.ask(path)
        assert (status, headers["WWW-Authenticate"]) == (401, 'Basic realm="dpflow", charset="UTF-8"')
        assert TOKEN.encode() not in body
    assert served.ask("/api/state", Authorization=f"Bearer {TOKEN}")[0] == 200


def test_streams_are_bounded(serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_server, "MAX_STREAMS", 2)
    served = serve()
    served.page.observe(Observation())
    first, second = streams = [http.client.HTTPConnection("127.0.0.1", served.port, timeout=60) for _ in "12"]
    for connection in streams:
        connection.request("GET", "/api/stream")
        answer = connection.getresponse()
        assert answer.readline() == b"id: 1\n"
    assert served.ask("/api/stream")[0] == 503
    first.close()
    answer.close()

    def is_free() -> bool:
        with served.raw() as connection:
            connection.sendall(b"GET /api/stream HTTP/1.1\r\nHost: localhost\r\n\r\n")
            return b" 200 " in connection.recv(20)

    wait(is_free, what="a stream after one has gone")
    second.close()


def test_who_takes_nothing_is_given_up_whatever_it_says(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_server, "MAX_STREAMS", 1)
    monkeypatch.setattr(page_server, "STUCK_S", 0.5)
    served = serve()
    much = Observation(failure="x" * (1 << 20))
    served.page.observe(much)
    with served.raw() as stuck:
        stuck.sendall(b"GET /api/stream HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert stuck.recv(15) == b"HTTP/1.1 200 OK"

        def is_full() -> bool:
            served.page.observe(much)
            connections = list(served.page._server.server_state.connections)
            return not connections or any(one.flow.write_paused for one in connections)

        wait(is_full, what="more updates than are taken")
        with suppress(OSError):
            stuck.sendall(b"x")
        wait(
            lambda: served.ask("/api/stream", "HEAD")[0] == 200,
            what="the stream after the one that was stuck",
        )


def test_connections_are_bounded_and_those_that_say_nothing_end(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve()
    silent = [served.raw() for _ in range(MAX_CONNECTIONS)]
    with served.raw() as beyond:
        assert said(beyond) == b""
    for connection in silent:
        connection.close()

    monkeypatch.setattr(page_server, "HEAD_S", 0.01)
    wait(lambda: _answers(served), what="an answer after the others have gone")
    for beginning in (b"", b"GET / HTTP/1.1\r\nHost: loc"):
        with served.raw() as slow:
            assert said(slow, beginning) == b""


def said(connection: socket.socket, text: bytes = b"") -> bytes:
    """The beginning of the answer to this; empty: the connection was ended."""
    try:
        connection.sendall(text)
        return connection.recv(12)
    except (ConnectionResetError, BrokenPipeError):
        return b""


def _answers(served: Served) -> bool:
    try:
        return served.ask("/")[0] == 200
    except OSError:
        return False


def observed(second: int, *, jobs: int) -> Observation:
    """A flow of which each job reads 1000 samples a second and waits for half of the time."""
    count = 1000 * jobs * second
    figures = ShardFigures(wants=count, hits=count // 2, decodes=count // 2, served=count, workers=2)
    row = FlowRow(
        flow="images:v1",
        state="accessed" if jobs else "ready",
        jobs=jobs,
        generation=1,
        shards=1,
        figures=figures,
        sharing="",
        restarts=0,
        limited_by="workers" if jobs else "",
        desired=2,
    )
    reads = {"stall_s": second / 2, "reading_s": second, "samples": 1000 * second, "bytes": second}
    rows = [JobRow(flow="images:v1", job=f"job-{n}", batches=second, **reads) for n in range(jobs)]
    workers = [
        ProcessRow(id=f"images:v1/shard-000/worker-{n}", flow="images:v1", role="worker", state="running")
        for n in range(30)
    ]
    return Observation(flows=[row], jobs=rows, processes=workers)


def is_seen(id: str) -> str:
    """Whether an element, or its first line, is within the window, in JavaScript."""
    box = f"document.getElementById('{id}').getBoundingClientRect()"
    return f"{box}.height > 0 && {box}.top >= 0 && {box}.top < innerHeight"


@pytest.mark.skipif(find_chromium() is None, reason=NO_CHROMIUM)
def test_a_browser_shows_first_what_limits_and_nothing_of_what_has_passed(
    serve: Callable[..., Served], tmp_path: Path
) -> None:
    served = serve()
    text, shows = "document.getElementById('{}')?.textContent", "document.body.innerText.includes"
    pixels = (
        "[...document.querySelectorAll('.plot')].every(one => one.querySelector('p').hidden"
        " === (one.querySelector('canvas') !== null))"
    )
    with opened(str(find_chromium())) as browser:
        browser.prefer("light")
        browser.open(f"http://127.0.0.1:{served.port}/")
        served.page.observe(Observation())
        browser.await_(f"{text.format('verdict')} === 'No job reads now.'")
        browser.await_("document.querySelectorAll('.plot > p:not([hidden])').length === 4")
        assert browser.tell(pixels), "no grid runs through the words"
        for second in (1, 2):
            served.page.observe(observed(second, jobs=2))
        browser.await_(f"{text.format('verdict')}.includes('Limited by too few workers: job-0 waits 50%')")
        assert browser.tell(f"{text.format('try')}.includes('dpflow flow scale images --workers N')")
        browser.await_("document.querySelectorAll('.plot > p:not([hidden])').length === 0")
        assert browser.tell(pixels)
        assert browser.tell(f"{shows}('2,000')")
        above = "document.getElementById('verdict').getBoundingClientRect().bottom"
        assert browser.tell(f"{above} < document.getElementById('summary').getBoundingClientRect().top")
        browser.picture(tmp_path / "reading.png")

        served.page.observe(observed(2, jobs=0))
        browser.await_(f"{text.format('verdict')} === 'No job reads now.'")
        rates = "[...document.querySelectorAll('#flows [data-title=\"Samples/s\"], #sum-rate')]"
        assert browser.tell(f"{rates}.map(one => one.textContent)") == [DASH, DASH]
        for word in ("accessed", "standing", "heard"):
            assert not browser.tell(f"{shows}('{word}')"), word

        for second in (1, 2):
            served.page.observe(observed(second, jobs=1))
        browser.await_(f"{rates}.every(one => one.textContent !== '{DASH}')")
        browser.size(1000, 500)
        browser.tell("scrollTo(0, document.body.scrollHeight)")
        served.page.close()
        browser.await_("document.body.classList.contains('old')")
        assert browser.tell("scrollY") > 100
        assert browser.tell(is_seen("link")), "the header stays, and says that there is no connection"
        assert browser.tell(is_seen("failure"))
        assert browser.tell("getComputedStyle(document.querySelector('main')).filter") == "grayscale(1)"
        assert browser.tell(f"{rates}.map(one => one.textContent)") == [DASH, DASH]
        browser.picture(tmp_path / "lost.png", whole=False)
