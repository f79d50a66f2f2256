"""The live page of a real cluster, over real HTTP: what it shows of jobs, of workers and services that are killed."""

from __future__ import annotations

import json
import signal
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.browser import opened
from tests.cluster_command import CommandedCluster
from tests.missing_parts import NO_CHROMIUM, find_chromium
from tests.shared_cluster import PATIENCE_S, free_port, open_job, wait
from tests.shared_datasets import Numbers
from torch_dpflow.cluster.client.open_job import JobOptions, SharedJob

SAMPLES = 90
#: What a job is called is up to its user: also what would be markup.
FLOW, NAME = "pages/train", "<b>mine</b>"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CommandedCluster]:
    started = CommandedCluster.up(tmp_path_factory.mktemp("c"), "--web", f"127.0.0.1:{free_port()}")
    yield started
    started.stop()


@pytest.fixture(scope="module")
def job(cluster: CommandedCluster) -> Iterator[SharedJob]:
    """A job that has read two epochs. Not before services are killed: it would connect again in another's test."""
    options = JobOptions(name=NAME, memory_bytes=8 << 20)
    opened = open_job(FLOW, Numbers(SAMPLES), address=cluster.address, batch_size=10, options=options)
    with closing(opened):
        assert sum(len(keys) for epoch in range(2) for _, keys in opened.traverse(epoch)) == 2 * SAMPLES
        yield opened


def await_state(cluster: CommandedCluster, what: str, condition: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """What the page shows once that holds."""
    found: list[dict[str, Any]] = []

    def holds() -> bool:
        try:
            with urllib.request.urlopen(f"http://{cluster.facts['web']}/api/state", timeout=PATIENCE_S) as answer:
                found.append(json.load(answer))
        except OSError:  # it does not run, or was asked too often
            return False
        return bool(condition(found[-1]))

    wait(holds, what=what)
    return found[-1]


def stream_of(cluster: CommandedCluster) -> Any:
    """The stream of updates, once this machine may ask again."""
    found: list[Any] = []

    def opened() -> bool:
        try:
            found.append(urllib.request.urlopen(f"http://{cluster.facts['web']}/api/stream", timeout=PATIENCE_S))
        except OSError:
            return False
        return True

    wait(opened, what="a stream of updates")
    return found[0]


def processes(told: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["id"]: row for row in told["processes"]}


def test_a_coordinator_and_a_page_that_are_killed_come_back(cluster: CommandedCluster) -> None:
    await_state(cluster, "the page", lambda told: "coordinator" in processes(told))
    cluster.kill("coordinator")
    told = await_state(
        cluster,
        "another coordinator",
        lambda told: processes(told)["coordinator"]["restarts"] == 1 and not told["failure"],
    )
    assert ("restart", "coordinator") in [(event["kind"], event["subject"]) for event in told["events"]]
    cluster.kill("page")
    await_state(cluster, "another page", lambda told: processes(told)["page"]["restarts"] == 1)


@pytest.mark.slow  # a lease
def test_who_was_frozen_is_not_said_to_have_run_out_of_memory(cluster: CommandedCluster) -> None:
    await_state(cluster, "the page", lambda told: "coordinator" in processes(told))
    cluster.kill("coordinator", signal.SIGSTOP)
    await_state(
        cluster,
        "why it was killed",
        lambda told: "was killed: no heartbeat for 10 s" in processes(told)["coordinator"]["ended"],
    )


def test_it_shows_a_flow_with_its_job_and_workers(cluster: CommandedCluster, job: SharedJob) -> None:
    told = await_state(
        cluster,
        "all samples of the job, and both workers, on the page",
        lambda told: (
            any(row["samples"] == 2 * SAMPLES for row in told["jobs"])
            and any(
                row["flow"] == f"{FLOW}:v1" and row["decodes"] and row["figures"]["workers"] == 2
                for row in told["flows"]
            )
        ),
    )
    (line,) = [row for row in told["flows"] if row["flow"] == f"{FLOW}:v1"]
    assert (line["state"], line["jobs"], line["shards"], line["figures"]["workers"]) == ("being read", 1, 1, 2)
    assert 0 < line["decodes"] < 2
    assert 0 <= line["hit_rate"] <= 1
    (mine,) = [row for row in told["jobs"] if row["flow"] == f"{FLOW}:v1"]
    assert (mine["job"], mine["batches"]) == (NAME, 18)
    assert 0 <= mine["stall"] <= 1
    assert f"{FLOW}:v1 {NAME}" in told["history"]["stall"]
    rows = processes(told)
    assert rows["page"]["state"] == rows["coordinator"]["state"] == "running"
    assert rows[f"{FLOW}:v1/shard-000/worker-1"]["role"] == "worker"


def test_a_worker_that_is_killed_is_in_the_stream(cluster: CommandedCluster, job: SharedJob) -> None:
    id = f"{FLOW}:v1/shard-000/worker-0"
    await_state(cluster, "a worker", lambda told: processes(told).get(id, {}).get("state") == "running")
    with closing(stream_of(cluster)) as stream:
        assert stream.readline().startswith(b"id: ")
        pid = cluster.kill(id)
        for line in iter(stream.readline, b""):
            told = json.loads(line.removeprefix(b"data: ")) if line.startswith(b"data: ") else {"events": []}
            if [event for event in told["events"] if event["kind"] == "restart" and event["subject"] == id]:
                break
    row = processes(told)[id]
    assert row["restarts"] == 1
    assert row["ended"].startswith(f"pid {pid} ")


def test_nothing_secret_is_shown(cluster: CommandedCluster) -> None:
    shown = json.dumps(await_state(cluster, "the page", bool))
    keys = json.loads(Path(cluster.address).read_text())
    secrets = [value for name, value in keys.items() if name.endswith(("_secret", "_public"))]
    assert len(secrets) == 4
    assert not [secret for secret in secrets if secret in shown]


@pytest.mark.skipif(find_chromium() is None, reason=NO_CHROMIUM)
def test_a_browser_shows_a_worker_that_is_killed_while_the_page_is_open(
    cluster: CommandedCluster, job: SharedJob
) -> None:
    id = f"{FLOW}:v1/shard-000/worker-1"
    told = await_state(cluster, "a worker", lambda told: processes(told).get(id, {}).get("state") == "running")
    before = processes(told)[id]["restarts"]
    with opened(str(find_chromium())) as browser:
        browser.prefer("light")
        browser.open(f"http://{cluster.facts['web']}/")
        shown = f"[...document.querySelectorAll('#jobs th')].some(one => one.textContent.includes('{NAME}'))"
        browser.await_(f"document.getElementById('jobs') && {shown}")
        cluster.kill(id)
        waited_s = browser.await_(
            f"[...document.querySelectorAll('#log li')].some(one => one.textContent.includes({json.dumps(id)})"
            " && /(was|has) ended/.test(one.textContent))"
        )
        print(f"shown {waited_s:.2f} s after the worker was killed")
        rows = "Object.fromEntries([...document.querySelectorAll('#workers tr')].map(one => "
        rows += "[[one.cells[0].lastChild, one.cells[0].firstChild].map(part => part.textContent).join('/'), "
        rows += "one.cells[4].textContent]))"
        assert browser.tell(rows)[id] == str(before + 1)

        # A keyboard is enough, and everything has a name.
        browser.tell("document.activeElement.blur()")
        focused = []
        while browser.tell("document.activeElement.id") != "pause":
            assert len(focused) < 20, focused
            browser.press("Tab", 9)
            focused.append(browser.tell("document.activeElement.outerHTML.slice(0, 60)"))
        assert "Skip to the figures" in focused[0]
        browser.press(" ", 32)
        browser.await_("document.getElementById('link').textContent === 'paused'")
        browser.press(" ", 32)
        browser.await_("document.getElementById('link').textContent === 'live'")
        for role in ("button", "checkbox", "table", "meter", "image", "heading"):
            names = browser.names(role)
            assert names, role
            assert all(names), (role, names)

        # What is old is said to be, until there is news.
        browser.tell(
            "const said = document.getElementById('failure'), has = name => document.body.classList.contains(name);"
            "let wasOld = false;"
            "const note = () => { wasOld ||= has('old') && said.textContent.includes('does not answer') };"
            "new MutationObserver(note).observe(document.body, {attributes: true})"
        )
        cluster.kill("page")
        browser.await_("wasOld && !has('old') && said.hidden")

        light = browser.tell("getComputedStyle(document.body).backgroundColor")
        browser.prefer("dark")
        assert browser.tell("getComputedStyle(document.body).backgroundColor") != light
        browser.size(360, 740, mobile=True)
        assert browser.tell("document.documentElement.scrollWidth") == 360, "nothing is wider than a phone"
        complaints = [one for one in browser.complaints if "net::ERR_" not in one]  # while there was no page
        assert complaints == [], "neither errors, nor what the policy has refused"
