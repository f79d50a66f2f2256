"""The identity of what workers are sent: the same in every process that sends the same, and what differs by name."""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import functools
import importlib
import io
import json
import pickle
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import new_process
from tests.new_process import ROOT, Interpreter, interpreter, run_interpreter
from tests.remote.shipping.aliased_pairs import ALIASED
from tests.remote.shipping.changed_module_pairs import CHANGED, UNREAD
from tests.remote.shipping.hostile_pairs import HOSTILE
from tests.remote.shipping.identity_pairs import DIFFER, Pair
from tests.remote.shipping.named_pairs import NAMED
from tests.remote.shipping.same_pairs import SAME
from torch_dpflow.cluster.messages.coordinator import FlowSpec
from torch_dpflow.errors import UsageError
from torch_dpflow.ipc.messages.content_parts import MAX_PARTS, PartDigest, differences, is_ignored
from torch_dpflow.ipc.messages.fields import MAX_TEXT
from torch_dpflow.remote.shipping.content_identity import ContentIdentity, fingerprint, identify
from torch_dpflow.remote.shipping.content_pack import pack, unpack
from torch_dpflow.remote.shipping.part_tree import PartNode, merged

Parts = dict[str, PartDigest]


ALL = [*DIFFER, *CHANGED, *HOSTILE, *ALIASED, *NAMED, *UNREAD, *SAME]
PROGRAM = "from tests.remote.shipping.identity_sides import main; main()"


class Sides:
    """What each script sends, from two processes that differ in hash seed, folder, imports and how they started.

    They run a group of pairs after another, for which alone a test waits: all take minutes on a busy machine.
    """

    def __init__(self, processes: Sequence[Interpreter], errors: Sequence[Path]) -> None:
        self._processes, self._errors = processes, errors
        self._found: tuple[dict[str, Any], ...] = tuple({} for _ in processes)

    def of(self, pair: str) -> list[dict[str, Any]]:
        """Return what each side has found of a pair."""
        for process, errors, found in zip(self._processes, self._errors, self._found):
            while pair not in found:
                assert process.stdout is not None
                line = process.stdout.readline()
                assert line, errors.read_text()
                found |= json.loads(line)
        return [found[pair] for found in self._found]

    def parts(self, pair: str) -> list[Parts]:
        return [{path: PartDigest(*part) for path, part in found["parts"].items()} for found in self.of(pair)]


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sides]:
    folder = tmp_path_factory.mktemp("sides")
    with contextlib.ExitStack() as stack:
        processes, errors = [], [folder / name for name in ("__main__", "__mp_main__")]
        for side, path in enumerate(errors):
            given = {"PYTHONHASHSEED": str(side + 1), "PYTHONPATH": str(ROOT), "TMPDIR": str(folder)}
            file = stack.enter_context(path.open("w"))
            process = interpreter(PROGRAM, str(side), path.name, env=given, stderr=file)
            processes.append(stack.enter_context(process))
        started = Sides(processes, errors)
        started.of(ALL[0].name)  # or a test would leave the processes behind that these start
        yield started
        for process in processes:
            process.communicate()
            assert process.returncode == 0


@pytest.fixture(scope="module")
def loaded(sides: Sides, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The samples of the second script of each pair that is run, from workers."""
    cases = tmp_path_factory.mktemp("cases") / "cases.json"
    cases.write_text(json.dumps({pair.name: sides.of(pair.name)[1] for pair in ALL if pair.is_run}))
    done = run_interpreter(PROGRAM, "worker", str(cases))
    assert done.returncode == 0, done.stderr
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("pair", [*DIFFER, *CHANGED, *HOSTILE, *ALIASED, *NAMED], ids=lambda pair: pair.name)
def test_what_differs_is_named(sides: Sides, pair: Pair) -> None:
    here, there = sides.parts(pair.name)
    for found in (differences(here, there, ()), differences(there, here, ())):
        assert any(path.startswith(pair.part) for path in found), found


@pytest.mark.parametrize("pair", SAME, ids=lambda pair: pair.name)
def test_what_does_not_differ_is_accepted_or_named_with_its_word(sides: Sides, pair: Pair) -> None:
    here, there = sides.parts(pair.name)
    part = pair.part[1:-1]
    assert [*differences(here, there, ())] == ([part] if part else [])
    assert not differences(here, there, [part] if part else [])


@pytest.mark.parametrize("pair", [one for one in ALL if one.is_run], ids=lambda pair: pair.name)
def test_a_worker_has_the_samples_of_the_script_or_raises(
    sides: Sides, loaded: dict[str, list[str]], pair: Pair
) -> None:
    if pair.loads:
        assert pair.loads in loaded[pair.name][0]
    else:
        assert loaded[pair.name] == sides.of(pair.name)[1]["samples"]


RUN_COMPILED = """
import json, sys
from tests.remote.shipping.identity_sides import load, run_pair
from tests.remote.shipping.same_pairs import COMPILED
found = run_pair(COMPILED, int(sys.argv[1]), "__main__")
print(json.dumps([found["parts"], found["samples"], load(found)]))
"""


@pytest.mark.slow
def test_a_function_that_torch_has_compiled_is_the_same_in_another_process() -> None:
    found = []
    for side in ("0", "1"):
        with interpreter(RUN_COMPILED, side, env={"PYTHONHASHSEED": side, "PYTHONPATH": str(ROOT)}) as process:
            out, errors = process.communicate()
        assert process.returncode == 0, errors
        found.append(json.loads(out))
    (here, samples, loaded), there = found
    assert samples == loaded
    assert here
    assert there == found[0]


@dataclasses.dataclass
class Held:
    value: Any
    other: Any = 0


ATOMS = (
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.floats(-2, 2)
    | st.text("ab", max_size=3)
    | st.binary(max_size=2)
)
HASHABLE = st.recursive(ATOMS, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3), max_leaves=4)
VALUES = st.recursive(
    ATOMS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(HASHABLE, inner, max_size=3)
        | st.sets(HASHABLE, max_size=3)
        | st.tuples(inner, inner)
        | st.builds(Held, inner, inner)
        | st.lists(st.builds(Held, inner), min_size=17, max_size=18)
        | st.lists(st.tuples(inner, ATOMS), min_size=17, max_size=18)
        | st.builds(lambda values: np.array(values, dtype=np.int16), st.lists(st.integers(-3, 3), max_size=3))
        | st.builds(lambda values: torch.tensor(values, dtype=torch.int16), st.lists(st.integers(-3, 3), max_size=3))
    ),
    max_leaves=8,
)


def described(value: Any) -> str:
    """Text that is the same for equal values and another for others."""
    if isinstance(value, set | frozenset):
        return f"{type(value).__name__} {sorted(map(described, value))}"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__} {[*map(described, value)]}"
    if isinstance(value, dict):
        return f"dict {[(described(key), described(each)) for key, each in value.items()]}"
    if isinstance(value, Held):
        return f"held {described([value.value, value.other])}"
    return f"{type(value).__name__} {value!r}"


def closure(value: Any) -> Any:
    def inner(index: int) -> Any:
        return value, index

    return inner


def with_default(value: Any) -> Any:
    return eval("lambda index, by=value: (by, index)", {"value": value})


def with_attribute(value: Any) -> Any:
    made = closure(0)
    made.value = value
    return made


#: What a dataset holds a value in.
HOLDERS: list[Callable[[Any], Any]] = [
    lambda value: value,
    Held,
    closure,
    with_default,
    with_attribute,
    lambda value: functools.partial(round, ndigits=value),
    lambda value: type("Made", (), {"value": value}),
    lambda value: types.SimpleNamespace(value=value),
    lambda value: [Held(0), {"key": (value,)}],
]


@functools.cache
def known() -> ContentIdentity:
    """Return one without what own modules have set, which is compared too: all pairs and strategies of this file."""
    return dataclasses.replace(identify({"dataset": Held(0)}, code=None), reached=frozenset())


def digest(obj: Any) -> dict[str, PartDigest]:
    """Return the parts of an object, without the parts of own modules."""
    return identify({"dataset": obj}, like=known()).parts


@given(VALUES, VALUES, st.sampled_from(HOLDERS))
@settings(max_examples=120, deadline=None)
def test_two_datasets_are_one_if_their_values_are_equal(one: Any, other: Any, holder: Callable[[Any], Any]) -> None:
    found = digest(holder(one))
    assert (found == digest(holder(other))) is (described(one) == described(other))
    assert found == digest(holder(copy.deepcopy(one)))
    assert found == digest(holder(pickle.loads(pickle.dumps(one))))


@given(VALUES, st.sampled_from(HOLDERS))
@settings(max_examples=50, deadline=None)
def test_what_is_sent_is_what_was_compared(value: Any, holder: Callable[[Any], Any]) -> None:
    sent = unpack(io.BytesIO(pack(Held(holder(value)))))
    assert digest(sent.value) == digest(holder(value))


def test_what_cannot_be_compared_is_equal_to_itself_only() -> None:
    class Strange:
        def __reduce__(self) -> str:
            raise TypeError("it has a handle")

    one, other = ({"part": Strange(), "scale": 1} for _ in range(2))
    assert fingerprint(one) == fingerprint(one)
    here, there = identify({"dataset": one}).parts, identify({"dataset": other}).parts
    ((path, text),) = differences(here, there, ()).items()
    assert path == "dataset['part']"
    assert text.endswith("Strange that cannot be compared")
    assert not differences(here, there, ["dataset[[]'part']"]) or not differences(here, there, ["dataset['part']"])


ACCESS_KEY = "AbC"


class WithSecrets:
    """A dataset with secrets where a user may have them."""

    def __init__(self) -> None:
        self.options = {"api_key": "AbC", "size": 3, "url": "sftp://me:AbC@host/x", "link": "https://host/x?sig=AbC"}
        self.login = types.SimpleNamespace(password="AbC")
        self.auth = ("me", "AbC")
        self.credentials = {"one": ["AbC"]}

    def __getitem__(self, index: int, pass_token: str = "AbC") -> str:
        return ACCESS_KEY


def test_values_of_secrets_are_not_shown() -> None:
    parts = identify({"dataset": WithSecrets()}).parts
    assert parts["dataset.options['size']"].text == "3"
    assert len([part for part in parts.values() if part.text == "value"]) >= 8
    assert f"{__name__}.ACCESS_KEY" in parts
    assert not [(path, part.text) for path, part in parts.items() if "AbC" in part.text]


def read_relative(index: int) -> str:
    return Path("data/x.txt").read_text()


@pytest.mark.parametrize(
    ("dataset", "is_relative"),
    [
        ({"root": "data"}, True),
        ({"root": Path("data")}, True),
        ({"files": [f"data/{one}.txt" for one in "xyz"] * 40}, True),
        ({"files": [(f"data/{one}.txt", 1) for one in "xyz"] * 40}, True),
        ({"labels": {f"data/{one}.txt": 1 for one in "xyz"}, "more": dict.fromkeys(map(str, range(99)), "")}, True),
        ({"labels": {one: f"data/{one}.txt" for one in map(str, range(99))} | {"0": "data/x.txt"}}, True),
        ({"read": read_relative}, True),
        ({"root": Path("/data"), "sep": ".", "files": ["/data/x.txt"] * 40, "parts": {"data": 1}}, False),
        ({"root": "elsewhere", "files": ["data/0.txt\0"]}, False),
    ],
)
def test_a_relative_path_is_of_the_current_directory(
    dataset: Any, is_relative: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for name in ("here", "there"):
        (tmp_path / name / "data").mkdir(parents=True)
        (tmp_path / name / "data" / "x.txt").write_text(name)
        monkeypatch.chdir(tmp_path / name)
        found.append(identify({"dataset": dataset}))
    here, there = found
    differing = differences(here.parts, there.parts, ())
    assert [*differing] == ["current directory"] * is_relative
    assert all("/here' here, " in text and text.endswith("/there' in the flow") for text in differing.values())
    assert not differences(identify({"dataset": dataset}, ignore=["current*"]).parts, here.parts, ["current*"])
    again = identify({"dataset": dataset}, like=here)  # the workers of its first epoch stay where they are
    assert not differences(again.parts, here.parts, ())


def test_a_large_description_is_joined_and_still_differs() -> None:
    many = {f"group{group}": {f"key{key}": key for key in range(60)} for group in range(60)}
    other = copy.deepcopy(many)
    other["group59"]["key59"] = 0
    here, there = identify({"dataset": many}).parts, identify({"dataset": other}).parts
    assert len(here) <= MAX_PARTS
    assert [*differences(here, there, ())] == ["dataset['group59']"]


def test_arguments_that_an_installed_class_holds_all_count() -> None:
    def dataset(rate: float) -> Any:
        held = torch.utils.data.TensorDataset(torch.zeros(1))
        vars(held)["args"] = argparse.Namespace(rate=rate)
        return held

    here, there = (identify({"dataset": dataset(rate)}) for rate in (0.1, 0.2))
    assert here.sent_arguments is None
    assert [*differences(here.parts, there.parts, ())] == ["dataset.args.rate"]


def test_files_of_modules_that_are_installed_where_workers_run_do_not_count_but_what_the_script_sets_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = identify({"dataset": Held(1)})
    installed = identify({"dataset": Held(1)}, code=None)
    assert found.bundle is not None
    assert installed.bundle is None
    assert __name__ in found.own.parts
    assert not installed.own.parts
    monkeypatch.setattr(new_process, "ROOT", "another")
    there = identify({"dataset": Held(1)}, code=None)
    assert differences(installed.parts, there.parts, ())
    assert there.state.members["tests.new_process"][".ROOT"].value == "another"


def test_patterns() -> None:
    assert is_ignored("train.args.lr", ["train.args"])
    assert is_ignored("dataset['lr']", ["dataset['l?']"])
    assert is_ignored("mydata.CACHE", ["*.CACHE"])
    assert not is_ignored("train.args_of", ["train.args"])


def test_an_argument_that_was_not_compared_cannot_be_read() -> None:
    arguments = argparse.Namespace(size=3, lr=0.1)
    sent = unpack(io.BytesIO(pack(arguments, sent_arguments={"size"})))
    assert sent.size == 3
    reads: list[Callable[[Any], Any]] = [
        lambda args: args.lr,
        lambda args: getattr(args, "lr", None),
        lambda args: hasattr(args, "lr"),
        vars,
        repr,
        copy.copy,
        pickle.dumps,
        lambda args: "lr" in args,
        lambda args: args == arguments,
        dir,
    ]
    for read in reads:
        with pytest.raises(UsageError, match=r"without lr: .*JobOptions\(ignore=\[\]\)"):
            read(sent)


@dataclasses.dataclass
class Searched:
    args: argparse.Namespace

    def read(self) -> Any:
        return self.args.size


def flow_spec(identity: ContentIdentity) -> FlowSpec:
    return FlowSpec(
        name="f", version=1, fingerprint={}, content="0" * 64, size=1, parts=identity.parts, ignore=identity.ignore
    )


def search_spec(size: int, ignore: list[str] | None) -> FlowSpec:
    name = "".join(("un", "read"))  # no code has it
    identity = identify({"dataset": Searched(argparse.Namespace(**{"size": size, name: size}))}, ignore=ignore)
    assert identity.sent_arguments is not None
    assert name not in identity.sent_arguments
    return flow_spec(identity)


def test_the_printed_word_admits_a_job_and_what_the_first_job_ignored_is_refused_to_others() -> None:
    first = search_spec(1, None)
    refused = search_spec(2, None).difference(first)
    part = "dataset.args.size"
    assert refused.endswith(f"JobOptions(ignore=['{part}'])")
    assert not search_spec(2, [part]).difference(first)
    ignoring = search_spec(1, [part])
    assert search_spec(2, None).difference(ignoring).startswith(f"{part}: ignored by the job that registered it; if")
    assert not search_spec(2, [part]).difference(ignoring)


def test_the_printed_word_names_every_part_that_differs() -> None:
    specs = [flow_spec(identify({f"p{at}": at + more for at in range(20)})) for more in (0, 1)]
    assert all(f"'p{at}'" in specs[0].difference(specs[1]) for at in range(20))
    long = [flow_spec(identify({f"{at:0300}": at + more for at in range(100)}, code=None)) for more in (0, 1)]
    assert len(long[0].difference(long[1])) < MAX_TEXT, "the message travels whole"


def test_another_version_of_an_installed_package_is_named(tmp_path: Path) -> None:
    program = (
        "import json, sys; sys.path.insert(0, sys.argv[1]); import tinypack, tinymods.part\n"
        "from torch_dpflow.remote.shipping.content_identity import identify\n"
        "parts = identify({'dataset': [tinypack.f, tinymods.part.g]}).parts\n"
        "print(json.dumps({path: [part.digest, part.own, part.text, part.optional] for path, part in parts.items()}))"
    )
    found: list[Parts] = []
    for version in ("1.0", "1.1"):
        folder = tmp_path / version / "site-packages"
        for top, file in (("tinypack", "tinypack.py"), ("tinymods", "tinymods/part.py")):
            place = folder / file
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text("def f(): return 0\ndef g(): return 0\n")
            info = folder / f"tiny_{top}-{version}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: tiny-{top}\nVersion: {version}\n")
            (info / "RECORD").write_text(f"{file},,\n")
            if top == "tinypack":
                (info / "top_level.txt").write_text(f"{top}\n")
        done = run_interpreter(program, str(folder))
        assert done.returncode == 0, done.stderr
        found.append({path: PartDigest(*part) for path, part in json.loads(done.stdout).items()})
    assert differences(*found, ()) == {
        "package:tiny-tinymods": "1.0 here, 1.1 in the flow",
        "package:tiny-tinypack": "1.0 here, 1.1 in the flow",
    }


OWN = """
import enum
from typing import Optional
T = int
def by(value, size=3, *, name="a") -> Optional[T]:
    "Read."
    return value * size
def other(value): return value
def listed(value, of=[1]): return of
def outer():
    x = 1
    def inner(): return x
    return inner
inner = outer()
class K:
    def read(self, at: T = 1): return at
"""
#: Changes of a module after which a digest that was kept must not be used.
CHANGES = """
m.by.__code__ = m.other.__code__.replace(co_name='by')
m.by.__defaults__ = (4,)
m.by.__defaults__ = (3.0,)
m.by.__defaults__ = (bytearray(b'a'),)
m.by.__defaults__ = None
m.by.__kwdefaults__['name'] = 'b'
m.by.__kwdefaults__ = {'name': 'b'}
m.by.__kwdefaults__ = None
m.by.__doc__ = 'Write.'
m.by.__name__ = 'to'
m.by.__qualname__ = 'K.by'
m.by.__module__ = 'another'
m.by.__annotations__['value'] = int
m.by.__annotations__['return'] = str
m.by.__annotations__ = {}
m.by.scale = 2
m.by = m.other
m.by = lambda value: value
m.by = types.FunctionType(m.by.__code__, {**vars(m)}, 'by', m.by.__defaults__)
del m.by
m.by, m.other = m.other, m.by
m.T = float
m.Optional = list
m.listed.__defaults__[0].append(2)
m.inner.__closure__[0].cell_contents = 2
m.K.read.__defaults__ = (2,)
m.K.read = m.other
m.K.read.__annotations__['at'] = str
m.K.more = m.by
del m.K.read
m.K = type('K', (), {})
m.more = m.other
m.__doc__ = 'Module.'
""".strip().splitlines()


def test_what_an_earlier_epoch_found_is_not_used_after_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for number, change in enumerate(CHANGES):
        name = f"own_settled_{number}"
        (tmp_path / f"{name}.py").write_text(OWN)
        module = importlib.import_module(name)
        before = identify({"dataset": [module.by, module.K]})
        assert before.settled[name].functions.keys() == {".by", ".other", ".outer", ".K.read"}
        assert identify({"dataset": [module.by, module.K]}, like=before).parts == before.parts
        roots = {"dataset": [module.by, module.K]}
        exec(change, {"__name__": "changes", "m": module, "types": types})
        parts = identify(roots, like=before).parts
        assert parts == identify(roots, like=dataclasses.replace(before, settled={})).parts, change
        assert differences(parts, before.parts, ()), change
        del sys.modules[name]


LEAVES = st.dictionaries(st.sampled_from(["(x)", ".f", "[0]"]), st.binary(max_size=2), min_size=1)


@given(LEAVES, LEAVES, st.booleans(), st.data())
def test_of_two_parts_with_one_path_each_leaf_counts(
    first: dict[str, bytes], other: dict[str, bytes], of_first: bool, data: st.DataObject
) -> None:
    def part_of(leaves: dict[str, bytes]) -> PartNode:
        return PartNode(b"", parts={".Crops": PartNode(b"", parts={name: PartNode(of) for name, of in leaves.items()})})

    def both() -> bytes:
        return merged(part_of(first), part_of(other).parts or {}).digest

    before, changed = both(), first if of_first else other
    name = data.draw(st.sampled_from(sorted(changed)))
    changed[name] += b"!"
    assert both() != before
