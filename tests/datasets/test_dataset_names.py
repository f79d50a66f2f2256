"""Names of datasets, versions and variants."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_dpflow.datasets.spec import LABEL, NAME, DatasetRef, next_version, version_order
from torch_dpflow.errors import OptionError, OptionTypeError

names = st.from_regex(NAME, fullmatch=True)
labels = st.from_regex(LABEL, fullmatch=True)


@given(names, names, st.none() | labels, st.none() | labels)
def test_a_name_survives_being_written(namespace: str, name: str, version: str | None, variant: str | None) -> None:
    ref = DatasetRef(f"{namespace}/{name}", version, variant if version else None)
    assert DatasetRef.parse(str(ref)) == ref


@pytest.mark.parametrize(
    "text",
    [
        *("", "x", "core/", "/x", "core/x/y", "core/../x", "core/.x", "core/x.json", "core/x ", "core/x\n"),
        *("core/x:", "core/x:v1:", "core/x:v1:a:b", "core/x:..:a", "core/x:v1/..", "core/x:v1\n", "c:re/x"),
    ],
)
def test_what_is_no_name_is_turned_down(text: str) -> None:
    with pytest.raises(OptionError, match=r"dataset|parts"):
        DatasetRef.parse(text)


def test_what_is_no_text_is_turned_down() -> None:
    with pytest.raises(OptionTypeError, match="core/x:v1:train"):
        DatasetRef.parse(3)  # type: ignore[arg-type]


def test_a_variant_needs_a_version() -> None:
    with pytest.raises(OptionError, match="needs a version"):
        DatasetRef("core/x", None, "train")


def test_the_parts_of_a_name_are_given_apart() -> None:
    with pytest.raises(OptionError, match="give id, version and variant apart"):
        DatasetRef("core/x:v1")


def test_versions_sort_by_their_numbers() -> None:
    names = ["v10", "v2", "v1.10", "v1.9", "v1", "2024-01", "beta", "v1a"]
    assert sorted(names, key=version_order) == ["2024-01", "beta", "v1", "v1.9", "v1.10", "v1a", "v2", "v10"]


@given(st.lists(labels))
def test_any_versions_can_be_sorted(versions: list[str]) -> None:
    ordered = sorted(versions, key=version_order)
    assert ordered == sorted(ordered, key=version_order)


@pytest.mark.parametrize(
    ("version", "following"), [("v1", "v2"), ("v9", "v10"), ("1.9-rc", "1.10-rc"), ("beta", "beta.2")]
)
def test_the_next_version_counts_the_last_number_up(version: str, following: str) -> None:
    assert next_version(version) == following
    assert version_order(version) < version_order(following)
