"""What is said of a flow whose jobs share little."""

from __future__ import annotations

import re

import pytest

from torch_dpflow.cluster.monitoring.cluster_figures import sharing_of


@pytest.mark.parametrize(("served", "decodes"), [(0, 0), (99, 99), (4000, 3000), (4000, 1000)])
@pytest.mark.parametrize("keeps", [True, False])
def test_nothing_is_said_before_it_is_known_and_where_much_is_shared(served: int, decodes: int, keeps: bool) -> None:
    assert sharing_of(served, decodes, size=1000, keeps=keeps) == (served, decodes, "", "")


@pytest.mark.parametrize(
    ("served", "keeps", "why"),
    [
        (
            4000,
            False,
            "is dropped once they have it.*Start the jobs together, or .*ALSDCache.*repeatable=True",
        ),
        (1000, True, "read about once so far"),
        (4000, True, "memory_bytes"),
    ],
)
def test_where_little_is_shared_it_says_why(served: int, keeps: bool, why: str) -> None:
    assert re.search(why, sharing_of(served, served + 17, size=1000, keeps=keeps).why)


def test_a_single_job_is_not_advised_to_share() -> None:
    assert sharing_of(4000, 4000, size=1000, keeps=False, jobs=1).why == ""
    small = sharing_of(4000, 4000, size=1000, keeps=True, jobs=1)
    assert "memory_bytes" in small.why
    assert "jobs together" not in small.why + small.change
    assert "jobs together" in sharing_of(4000, 4000, size=1000, keeps=True, jobs=2).change
