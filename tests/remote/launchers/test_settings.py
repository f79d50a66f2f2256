"""Settings of platforms: which source decides, and what a mistake is answered with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.hosts import OnHosts
from torch_dpflow import DPFlowDataLoader, LoaderOptions
from torch_dpflow.errors import OptionError
from torch_dpflow.remote import Processes, Ray
from torch_dpflow.remote.launchers import registry, settings


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
    assert registry.network()[0].listen == ""


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
    assert registry.network()[0].listen == "tcp://10.0.0.5:7700"
    assert registry.resolve("ray") == Ray()


@pytest.mark.parametrize("text", ["[tool]\ndpflow = 3\n", "tool.dpflow = 3\n", "[tool.dpflow]\nnetwork = 3\n"])
def test_what_is_no_table_in_pyproject_is_not_passed_over(write: Write, text: str) -> None:
    path = write("project/pyproject.toml", text)
    with pytest.raises(OptionError, match=rf"{path}(:\d)?: (tool.dpflow|network) is no table; write \["):
        registry.network()


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
            r"dpflow.toml:1: there is no table 'listen'; it is one of \['autoscale', 'network', 'platform'\]",
        ),
        ("[network]\nsecret = 'x'\n", r"dpflow.toml:2: network has no 'secret'; it is one of \['listen'\]"),
        ("[platform.ray]\ncpus = 'two'\n", r"dpflow.toml:2: platform.ray.cpus: Expected `float`, got `str`"),
        ("[platform.ray]\n\ncpus = 0\n", r"dpflow.toml:3: platform.ray.cpus=0.0 is out of range"),
        ("[platform]\nray = 1\n", r"dpflow.toml:2: ray is no table; write \[platform.ray\]"),
        ("cpus 1", r"dpflow.toml is no TOML: .*line 1"),
        pytest.param("cpus = " + "[" * 50_000, r"dpflow.toml is no TOML", id="deep"),
        ("platform = 3\n", r"dpflow.toml:1: platform is no table; write \[platform"),
        ("network = 3\n", r"dpflow.toml:1: network is no table; write \[network\]"),
        (
            "[platform.processes]\npythn = 'python3'\n",
            r"dpflow.toml:2: platform.processes has no 'pythn'; did you mean 'python'",
        ),
        ("[platform.processes]\npython = 3\n", r"dpflow.toml:2: platform.processes.python: Expected `str`"),
        (
            "[network]\nlisten = ''\n\n[platform.ray]\nmemory = 0\n",
            r"dpflow.toml:5: platform.ray.memory=0 is out",
        ),
        (
            "[network]\nlisten = 'tcp://a'\n",
            r"dpflow.toml:2: network.listen='tcp://a': must be tcp://HOST:PORT",
        ),
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
        (
            "DPFLOW_PLATFORM_RAY_CPUS",
            "many",
            "the variable DPFLOW_PLATFORM_RAY_CPUS: platform.ray.cpus: Expected `float`",
        ),
        (
            "DPFLOW_PLATFORM_RAY_CPUS",
            "0",
            "the variable DPFLOW_PLATFORM_RAY_CPUS: platform.ray.cpus=0.0 is out",
        ),
        (
            "DPFLOW_PLATFORM_RAY_RESOURCES",
            "{a}",
            "the variable DPFLOW_PLATFORM_RAY_RESOURCES is no table of TOML",
        ),
        (
            "DPFLOW_PLATFORM_RAY_RESOURCES",
            "a",
            r"_RAY_RESOURCES: platform.ray.resources: Expected `object`, got `str`; write it as TOML has it: \{ lo",
        ),
        ("DPFLOW_PLATFORM", "ray", "DPFLOW_PLATFORM is no setting: name one, as DPFLOW_PLATFORM_RAY_CPUS"),
        ("DPFLOW_NETWORK", "tcp://a:1", "DPFLOW_NETWORK is no setting: name one"),
        ("DPFLOW_PLATFORM_RAY", "1", "DPFLOW_PLATFORM_RAY: platform.ray has no ''; it is one of"),
        (
            "DPFLOW_PLATFORM_RAI_CPUS",
            "1",
            "DPFLOW_PLATFORM_RAI_CPUS: platform has no 'rai'; did you mean 'ray'",
        ),
        (
            "DPFLOW_PLATFORM_PROCESSES_PYTHN",
            "python3",
            "DPFLOW_PLATFORM_PROCESSES_PYTHN: platform.processes has no 'pythn'; did you mean 'python'",
        ),
        (
            "DPFLOW_PLATFORM_FC_MARGIN_S",
            "5",
            "DPFLOW_PLATFORM_FC_MARGIN_S: platform.fc has no 'margin_s'; it is one of",
        ),
        ("DPFLOW_PLATFORM_RAY_NAME", "x", "DPFLOW_PLATFORM_RAY_NAME: platform.ray has no 'name'"),
        ("DPFLOW_NETWORK_LISTN", "x", "DPFLOW_NETWORK_LISTN: network has no 'listn'; did you mean 'listen'"),
        ("DPFLOW_NETWORK_LISTEN", "x", "DPFLOW_NETWORK_LISTEN: network.listen='x': must be tcp"),
    ],
)
def test_mistakes_in_variables_are_named(
    write: Write, monkeypatch: pytest.MonkeyPatch, variable: str, text: str, told: str
) -> None:
    monkeypatch.setenv(variable, text)
    with pytest.raises(OptionError, match=told):
        registry.resolve("ray")


def test_mistakes_of_the_network_are_found_when_a_loader_is_made(write: Write) -> None:
    path = write("project/dpflow.toml", "[network]\n\nlisten = '10.0.0.5'\n")
    with pytest.raises(OptionError, match=rf"^{path}:3: network.listen='10.0.0.5': must be tcp://"):
        DPFlowDataLoader(range(2), num_workers=1, platform=Processes())
    options = LoaderOptions(listen="tcp://127.0.0.1:0")  # goes before
    assert DPFlowDataLoader(range(2), num_workers=1, platform=Processes(), options=options).platform


def test_an_address_of_the_settings_that_workers_cannot_reach_is_named(write: Write) -> None:
    path = write("project/dpflow.toml", "[network]\nlisten = 'tcp://127.0.0.1:0'\n")
    with pytest.raises(OptionError, match=rf"^{path}:2: network.listen='tcp://127.0.0.1:0': the hosts reach"):
        DPFlowDataLoader(range(2), num_workers=1, platform=OnHosts(address="10.9.8.7", prefixes=()))


def test_what_is_no_file_is_not_passed_over(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write("project/dpflow.toml/inside", "").parent
    with pytest.raises(OptionError, match=f"{directory} cannot be read: Is a directory; make it a file"):
        registry.network()
    monkeypatch.setenv("DPFLOW_CONFIG", str(directory))
    with pytest.raises(OptionError, match=r"dpflow.toml cannot be read: Is a directory; DPFLOW_CONFIG names it"):
        registry.network()
    monkeypatch.setenv("DPFLOW_CONFIG", "~nobody-of-this-name/dpflow.toml")
    with pytest.raises(OptionError, match=r"~nobody-of-this-name/dpflow.toml cannot be read: No such file"):
        registry.network()


def test_a_link_that_leads_nowhere_is_not_passed_over(write: Write, tmp_path: Path) -> None:
    write("project/deep/other", "")
    (tmp_path / "project/dpflow.toml").symlink_to("nowhere")
    with pytest.raises(OptionError, match=r"dpflow.toml cannot be read: No such file"):
        registry.network()


@pytest.mark.parametrize(
    "text", ["tool = 3 # [tool.dpflow]\n", "[tool]\ndpflow = 3 # [tool.dpflow]\n", "[[tool.dpflow]]\n"]
)
def test_a_table_of_pyproject_that_is_none_is_named(write: Write, text: str) -> None:
    write("project/pyproject.toml", text)
    with pytest.raises(OptionError, match=r"pyproject.toml.* tool.dpflow is no table; write \[tool.dpflow"):
        registry.network()


def test_a_platform_that_cannot_be_imported_concerns_only_jobs_that_name_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_platform.py").write_text("raise AttributeError('module ssl has no attribute PROTOCOL')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(registry._KNOWN, "ray", ("broken_platform", "Ray"))
    assert registry.resolve("processes").name == "processes"
    assert registry.network()[0] == settings.Network()
    with pytest.raises(OptionError, match="platform='ray' cannot be imported: AttributeError: module ssl"):
        registry.resolve("ray")


def test_the_platforms_that_run_nodes_are_known_without_their_libraries() -> None:
    able = [name for name in registry._KNOWN if hasattr(registry._kind(name), "open_nodes")]
    assert registry.with_nodes() == able
