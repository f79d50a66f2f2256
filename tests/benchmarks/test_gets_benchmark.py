"""The benchmark of GETs: each client reads objects in plain and with TLS."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest

from benchmarks import gets


@pytest.mark.skipif(find_spec("oss2") is None or find_spec("s3fs") is None, reason="not all clients are installed")
def test_each_client_reads_in_plain_and_with_tls(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for variable in gets.CERTIFICATES:
        monkeypatch.setenv(variable, "")  # and restores what the benchmark sets
    monkeypatch.setattr(gets, "SIZES", {100_000: 16})
    monkeypatch.setattr(gets, "AT_ONCE", (16,))
    gets.main(["--quick", "--json"])
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len({record["workload"] for record in records}) == len(records) == 2
    for record in records:
        assert set(record["rounds"]) == set(gets.CLIENTS)
        assert all(one["gets_per_s"] > 0 for runs in record["rounds"].values() for one in runs)
