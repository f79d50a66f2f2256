"""What a loader and its options refuse when they are made, for platforms: each mistake with what to do."""

from __future__ import annotations

import pickle
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from tests.loader_cases import Augmented
from torch_dpflow import DPFlowDataLoader, LoaderOptions
from torch_dpflow.errors import MissingExtraError, OptionError, OptionTypeError
from torch_dpflow.remote import Processes, Ray


def loader(**arguments: Any) -> DPFlowDataLoader[Any]:
    return DPFlowDataLoader(Augmented(2), **{"num_workers": 1, **arguments})


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"listen": "tcp://127.0.0.1:0"}, "listen='tcp://127.0.0.1:0' without a platform"),
        ({"min_workers": 2}, "min_workers=2 without a platform"),
        ({"code": None}, "code=None without a platform"),
        ({"code": [], "min_workers": 3}, r"code=\[\], min_workers=3 without a platform"),
    ],
)
@pytest.mark.parametrize("arguments", [{}, {"num_workers": 0}])
def test_options_of_platforms_are_refused_without_one(
    options: dict[str, Any], told: str, arguments: dict[str, Any]
) -> None:
    with pytest.raises(OptionError, match=f"{told}: .*platform='ray'"):
        loader(options=LoaderOptions(**options), **arguments)


def test_a_loader_of_a_flow_refuses_options_that_it_would_ignore() -> None:
    used: dict[str, Any] = {"code": None, "watch": None}
    assert loader(options=LoaderOptions(**used), flow="a/b").options == LoaderOptions(**used)
    ignored: dict[str, Any] = {
        "read_threads": 2,
        "seeding": "worker",
        "prefetch_growth": 1.0,
        "restart_limit": 1,
        "poison_limit": 1,
        "task_timeout_s": 1.0,
        "shared_memory": 0,
        "listen": "tcp://127.0.0.1:0",
        "min_workers": 3,
    }
    assert used.keys() | ignored.keys() == {field.name for field in fields(LoaderOptions)}
    for name, value in ignored.items():
        with pytest.raises(OptionError, match=f"^{name}={value!r} with flow='a/b': .* leave them out"):
            loader(options=LoaderOptions(code=None, **{name: value}), flow="a/b")
    with pytest.raises(OptionError, match=r"^poison_limit=1, listen='tcp://.*' with flow='a/b'"):
        loader(options=LoaderOptions(listen="tcp://127.0.0.1:0", poison_limit=1), flow="a/b", num_workers=0)


@pytest.mark.parametrize(
    ("options", "error", "told"),
    [
        ({"code": 3}, OptionTypeError, "code=3: give 'auto', None, or a list of paths"),
        ({"code": [3]}, OptionTypeError, r"code=\[3\]: 3 is not a path"),
        ({"code": {"src": 1}}, OptionTypeError, "give 'auto', None, or a list of paths"),
        ({"code": "src"}, OptionError, "give 'auto', None, or a list of paths"),
        ({"code": ["src/nowhere"]}, OptionError, "there is no 'src/nowhere' in /"),
        ({"code": ["/dev/full"]}, OptionError, "'/dev/full' is a device, pipe or socket; give files"),
        ({"code": ["/dev/null"]}, OptionError, "'/dev/null' is a device, pipe or socket; give files"),
        ({"listen": 5}, OptionTypeError, "listen=5 is of type int"),
        ({"listen": ""}, OptionError, "listen='': must be tcp://"),
        ({"min_workers": "2"}, OptionTypeError, "min_workers='2' is of type str"),
        ({"min_workers": True}, OptionTypeError, "min_workers=True is of type bool"),
        ({"min_workers": 0}, OptionError, "min_workers=0 is out of range"),
    ],
)
def test_options_are_checked_when_they_are_made(options: dict[str, Any], error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told) as raised:
        LoaderOptions(**options)
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)


@pytest.mark.parametrize(
    ("arguments", "error", "told"),
    [
        ({"platform": "procesess"}, OptionError, "did you mean 'processes'"),
        ({"platform": "RAY"}, OptionError, "did you mean 'ray'"),
        ({"platform": ""}, OptionError, r"platform='' is none of \['fc', .*'ray'\]"),
        ({"platform": 3}, OptionTypeError, r"platform=3 is of type int; give one of \['fc', .*'ray'\]"),
        ({"platform": Ray}, OptionTypeError, r"platform=Ray is a class; did you mean Ray\(\)\?"),
        ({"platform": Path("/")}, OptionTypeError, "is of type PosixPath; give one of"),
        ({"platform": "processes", "num_workers": 0}, OptionError, "give the number of workers"),
        (
            {"multiprocessing_context": "spawn"},
            OptionError,
            "platform='processes' with multiprocessing_context='spawn': .* leave it out",
        ),
        ({"flow": "a/b"}, OptionError, "leave out one of the two"),
        ({"options": LoaderOptions(min_workers=2)}, OptionError, "min_workers=2 .* give at most 1"),
        ({"options": 3}, OptionTypeError, "options=3 is of type int"),
    ],
)
def test_loaders_that_no_platform_can_serve_are_refused(
    arguments: dict[str, Any], error: type[Exception], told: str
) -> None:
    with pytest.raises(error, match=told):
        loader(**{"platform": "processes", **arguments})


@pytest.mark.parametrize(
    "platform", [Processes(env={"KEY": "s3cr3t"}), Ray(runtime_env={"env_vars": {"KEY": "s3cr3t"}})]
)
def test_an_error_names_the_platform_and_no_key_of_its_settings(platform: Any) -> None:
    with pytest.raises(OptionError, match=rf"^platform={type(platform).__name__}\(.* with num_workers=0") as raised:
        loader(platform=platform, num_workers=0)
    assert "s3cr3t" not in str(raised.value)


def test_a_missing_library_is_told_of_when_the_loader_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    for platform in ("ray", Ray()):
        with pytest.raises(MissingExtraError, match=r"pip install 'torch_dpflow\[ray\]'"):
            loader(platform=platform)


@pytest.mark.parametrize(
    ("settings", "error", "told"),
    [
        ({"cpus": 0}, OptionError, "cpus=0 is out of range"),
        ({"cpus": "2"}, OptionTypeError, "cpus='2'"),
        ({"memory": "2 bags"}, OptionError, "memory='2 bags' is no size"),
        ({"memory": 0}, OptionError, "memory=0 is out of range"),
        ({"memory": 1.5}, OptionTypeError, "memory=1.5 is of type float; give bytes as text"),
        ({"memory": True}, OptionTypeError, "memory=True is of type bool"),
        ({"resources": {"loader": -1}}, OptionError, "'loader'"),
        ({"resources": {"": 1}}, OptionError, "resources has '', and takes the cluster's own kinds"),
        ({"resources": {"object_store_memory": 1}}, OptionError, "the cluster's own kinds"),
        ({"address": " localhost:6379"}, OptionError, "HOST:PORT"),
        ({"address": "http://head:8265"}, OptionError, "HOST:PORT"),
        ({"address": "head:\u0664"}, OptionError, "HOST:PORT"),
        ({"resources": {"CPU": 1}}, OptionError, "give cpus or memory"),
        ({"resources": {3: 1}}, OptionTypeError, "resources has 3, .* text"),
        ({"resources": "loader"}, OptionTypeError, "resources='loader'"),
        ({"runtime_env": ["pip"]}, OptionTypeError, "runtime_env="),
        ({"address": 6379}, OptionTypeError, "address=6379"),
        ({"address": "ray://head:10001"}, OptionError, "ray job submit"),
        ({"address": "nonsense"}, OptionError, "give HOST:PORT, as 10.0.0.5:6379"),
        ({"address": "10.0.0.5:99999"}, OptionError, "give HOST:PORT"),
        ({"wait_s": -1}, OptionError, "wait_s=-1"),
        ({"wait_s": None}, OptionTypeError, "wait_s=None"),
    ],
)
def test_settings_of_ray_that_cannot_be_are_refused(
    settings: dict[str, Any], error: type[Exception], told: str
) -> None:
    with pytest.raises(error, match=told):
        Ray(**settings)


def test_memory_is_an_int_of_bytes_or_text() -> None:
    assert Ray(memory=2**31).needs == Ray(memory="2GiB").needs == {"CPU": 1.0, "memory": 2.0**31}
    assert Ray(memory=2**31) == Ray(memory=2**31)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"python": 3}, "python=3 is of type int; give text"),
        ({"env": ["A=1"]}, "env=.* is of type list; give a dict"),
        *(
            ({"env": env}, "a variable's name has no '='")
            for env in ({"A=B": "x"}, {"": "x"}, {"A": "x\0"}, {"A\0": ""})
        ),
        ({"env": {"A": b"s3cr3t"}}, "env has 'A' of type bytes; give variables and their values as text"),
        ({"env": {3: "1"}}, "env has 3 of type str; give"),
    ],
)
def test_settings_of_processes_that_cannot_be_are_refused(settings: dict[str, Any], told: str) -> None:
    with pytest.raises((OptionError, OptionTypeError), match=told):
        Processes(**settings)
