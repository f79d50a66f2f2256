"""What workers are called, and how often they are started."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_dpflow.errors import OptionError
from torch_dpflow.remote.launchers.contract import RateLimit, cluster_of, prefix_of


@given(
    st.integers(0, 16**8 - 1).map("{:08x}".format),
    st.integers(0, 16**10 - 1).map("{:010x}".format),
    st.integers(0, 10**6 - 1),
    st.integers(0, 10**18 - 1),
)
def test_a_name_is_a_label_that_names_its_cluster(cluster: str, group: str, number: int, incarnation: int) -> None:
    name = f"{prefix_of(cluster, group)}{number}-{incarnation}"
    assert re.fullmatch(r"[a-z][a-z0-9-]{0,61}[a-z0-9]", name)
    assert cluster_of(name) == cluster
    assert prefix_of(cluster, group).startswith(prefix_of(cluster))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "pod-1",
        "dpf-0c0ffee-0123456789-0-1",
        "dpf-0C0FFEE0-0123456789-0-1",
        "dpf-0c0ffee0-0123456789-01-1",
        "dpf-0c0ffee0-0123456789-0-1\n",
        "dpf-0c0ffee0-0123456789-0-٣",
        "dpf-0c0ffee0-0123456789-1000000-1",
    ],
)
def test_other_texts_are_no_names(text: str) -> None:
    assert cluster_of(text) is None


@given(
    st.floats(0.01, 50.0),
    st.lists(st.floats(0.0, 30.0), max_size=60),
)
def test_a_rate_holds_in_every_period(per_s: float, pauses: list[float]) -> None:
    limit = RateLimit(per_s)
    now, done = 0.0, []
    for pause_s in pauses:
        now += pause_s
        wait_s = limit.wait_s(now)
        assert 0.0 <= wait_s <= limit.period_s
        if wait_s == 0:
            limit.note(now)
            done.append(now)
        latest = [one for one in done if now - one < limit.period_s]
        assert len(latest) <= max(1, per_s * limit.period_s)


@pytest.mark.parametrize("per_s", [0.0, -1.0, float("nan")])
def test_a_rate_is_above_nothing(per_s: float) -> None:
    with pytest.raises(OptionError, match="per_s"):
        RateLimit(per_s)
