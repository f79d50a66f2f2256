"""Incast in simulated time: everything at once collapses, windows do not, and TCP delivers every record in order."""

from __future__ import annotations

import json

import pytest

from tests.later import Later

incast, network = Later("benchmarks.incast"), Later("benchmarks.incast_network")


@pytest.mark.parametrize("name", ["rows of 4 kB", "files of 16 kB"])
def test_at_32_servers_everything_at_once_collapses_and_windows_do_not(name: str) -> None:
    figures = {side: incast.measure(incast.SETS[name], 32, make, 4, seed=1) for side, make in incast.SIDES.items()}
    assert figures["at once"]["share"] < 0.3
    assert figures["at once"]["timeouts"] > 0
    for side in ("Algorithm 1, repaired", "ours"):
        assert figures[side]["share"] >= 0.95
        assert figures[side]["timeouts"] == 0


def test_records_larger_than_the_switchs_buffer() -> None:
    figures = incast.measure(incast.SETS["files of 110 kB"], 32, incast.SIDES["ours"], 4, seed=1)
    assert figures["share"] >= 0.95
    assert figures["timeouts"] < 1  # now and then two at once are tried, which do not fit


@pytest.mark.parametrize("servers", [1, 12])
def test_every_record_comes_and_those_of_a_connection_in_order(servers: int) -> None:
    simulated = network.Network(network.Line(), servers)
    came: list[tuple[int, int]] = []
    for record in range(5):
        for number, connection in enumerate(simulated.connections):
            connection.request(20_000, lambda number=number, record=record: came.append((number, record)))
    simulated.run_until(lambda: len(came) == 5 * servers)
    for number in range(servers):
        assert [record for who, record in came if who == number] == [*range(5)]
    assert (simulated.drops > 0) == (servers > 1)


def test_the_table_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert incast.main(["--simulate", "--quick", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["workload"] for line in lines] == ["files of 16 kB, 1 server", "files of 16 kB, 32 servers"]
    with pytest.raises(SystemExit):
        incast.main(["--simulate", "--batches", "0"])
