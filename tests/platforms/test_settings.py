"""Settings of platforms: which source decides, and what a mistake is answered with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from torch_dpflow.errors import OptionError
from torch_dpflow.platforms import Processes, Ray, registry


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], Path]]:
    """Writes a file below the current directory's parent; there is no other one that counts."""
    home, work = tmp_path / "home", tmp_path / "project" / "deep"
    work.mkdir(parents=True)
    for variable in ("DPFLOW_CONFIG", "DPFLOW_PLATFORM_RAY_CPUS", "DPFLOW_NETWORK_LISTEN"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home))
    monkeypatch.chdir(work)

    def write(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return write


def all_settings() -> None:
    registry.resolve("ray")
    registry.network()


Write = Callable[[str, str], Path]


def test_without_any_there_are_defaults(write: Write) -> None:
    assert registry.resolve("ray") == Ray()
    assert registry.resolve("processes") == Processes()
    assert registry.network().listen == ""


def test_arguments_go_before_the_environment_and_that_before_files(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("home/dpflow/config.toml", '[platform.ray]\ncpus = 3\nmemory = "1GiB"\naddress = "10.0.0.5:6379"\n')
    write("project/dpflow.toml", '[platform.ray]\ncpus = 2\nmemory = "2GiB"\nresources = { loader = 0.5 }\n')
    write("project/pyproject.toml", "[tool.dpflow.platform.ray]\ncpus = 7\n")  # beside dpflow.toml
    monkeypatch.setenv("DPFLOW_PLATFORM_RAY_CPUS", "0.25")
    monkeypatch.setenv("DPFLOW_PLATFORM_RAY_RUNTIME_ENV", '{ pip = ["simplejpeg"] }')
    assert registry.resolve("ray") == Ray(
        cpus=0.25,
        memory="2GiB",
        resources={"loader": 0.5},
        address="10.0.0.5:6379",
        runtime_env={"pip": ["simplejpeg"]},
    )
    given = Ray(cpus=1)
    assert registry.resolve(given) is given


def test_a_table_of_pyproject_counts_where_it_is_nearest(write: Write) -> None:
    write("dpflow.toml", "[platform.ray]\ncpus = 3\n")
    write("project/pyproject.toml", '[tool.ruff]\n[tool.dpflow.network]\nlisten = "tcp://10.0.0.5:7700"\n')
    write("project/deep/pyproject.toml", "[tool.ruff]\n")
    assert registry.network().listen == "tcp://10.0.0.5:7700"
    assert registry.resolve("ray") == Ray()


def test_a_named_file_is_the_only_one(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    write("home/dpflow/config.toml", "[platform.ray]\ncpus = 3\n")
    path = write("elsewhere.toml", '[platform.ray]\nmemory = "1GiB"\n')
    monkeypatch.setenv("DPFLOW_CONFIG", str(path))
    assert registry.resolve("ray") == Ray(memory="1GiB")
    monkeypatch.setenv("DPFLOW_CONFIG", str(path) + "l")
    with pytest.raises(OptionError, match="cannot be read: No such file"):
        registry.resolve("ray")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "\n[platform.ray]\nmemory = '1GiB'\ncpu = 1\n",
            r"dpflow.toml:4: platform.ray has no 'cpu'; did you mean 'cpus'",
        ),
        ("[platform.rai]\ncpus = 1\n", r"dpflow.toml:1: platform has no 'rai'; did you mean 'ray'"),
        (
            "[network]\n[platfrom.ray]\n",
            r"dpflow.toml:2: there is no table 'platfrom'; did you mean 'platform'",
        ),
        (
            "listen = 1\n",
            r"dpflow.toml:1: there is no table 'listen'; it is one of \['network', 'platform'\]",
        ),
        ("[network]\nsecret = 'x'\n", r"dpflow.toml:2: network has no 'secret'; it is one of \['listen'\]"),
        ("[platform.ray]\ncpus = 'two'\n", r"dpflow.toml:2: platform.ray.cpus: Expected `float`, got `str`"),
        ("[platform.ray]\n\ncpus = 0\n", r"platform='ray', by its settings .*: cpus=0.0 is out of range"),
        ("[platform]\nray = 1\n", r"dpflow.toml:2: ray is no table; write \[platform.ray\]"),
        ("cpus 1", r"dpflow.toml is no TOML: .*line 1"),
    ],
)
def test_mistakes_in_a_file_are_named(write: Write, text: str, told: str) -> None:
    write("project/dpflow.toml", text)
    with pytest.raises(OptionError, match=told):
        all_settings()


@pytest.mark.parametrize(
    ("variable", "text", "told"),
    [
        (
            "DPFLOW_PLATFORM_RAY_CPU",
            "1",
            "the variable DPFLOW_PLATFORM_RAY_CPU: platform.ray has no 'cpu'; did you",
        ),
        ("DPFLOW_PLATFORM_RAY_CPUS", "many", "the environment: platform.ray.cpus: Expected `float`"),
    ],
)
def test_mistakes_in_variables_are_named(
    write: Write, monkeypatch: pytest.MonkeyPatch, variable: str, text: str, told: str
) -> None:
    monkeypatch.setenv(variable, text)
    with pytest.raises(OptionError, match=told):
        registry.resolve("ray")
