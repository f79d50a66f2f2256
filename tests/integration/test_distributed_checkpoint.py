"""torch.distributed.checkpoint: a loader's state is saved and loaded by it, at any position and world size."""

from __future__ import annotations

import io
import json
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DistributedSampler

from tests.later import Later
from tests.loader_cases import Indices, StatefulSampler
from tests.new_process import run_interpreter
from tests.shared_cluster import free_port
from torch_dpflow import DynaGCSSampler

checkpoint = Later("torch.distributed.checkpoint")
SIZE = 60


def saved(path: Path, state: dict[str, Any]) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one process without torch.distributed
        checkpoint.save(state, checkpoint_id=path, no_dist=True)
    return path


def loaded(path: Path, state: dict[str, Any]) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checkpoint.load(state, checkpoint_id=path, no_dist=True)
    return state


class Noted:
    """A sampler whose state is neither plain nor a tensor."""

    def __init__(self, size: int) -> None:
        self.given = np.zeros(1, np.int64)
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Any:
        for index in range(int(self.given[0]), self.size):
            self.given[0] = index + 1
            yield index
        self.given[0] = 0

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given, "at": (int(self.given[0]), torch.tensor(1))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given = state["given"]
        assert state["at"][0] == self.given[0]


SAMPLERS: dict[str, Callable[[], dict[str, Any]]] = {
    "shuffle": lambda: {"shuffle": True, "generator": torch.Generator().manual_seed(1)},
    "own state": lambda: {"sampler": StatefulSampler(SIZE)},
    "objects": lambda: {"sampler": Noted(SIZE)},
    "ranks": lambda: {"sampler": DistributedSampler(Indices(SIZE), num_replicas=2, rank=1)},
    "DynaGCSSampler": lambda: {"sampler": DynaGCSSampler(Indices(SIZE), num_replicas=2, rank=1)},
}


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("taken", [0, 1, 4, 100])
def test_a_state_is_loaded_into_a_new_loader(OurLoader: Any, name: str, taken: int, tmp_path: Path) -> None:
    """`Stateful` objects: `load` reads the keys of the new loader's state, and gives the loader their values."""

    def made() -> Any:
        return OurLoader(Indices(SIZE), batch_size=4, **SAMPLERS[name]())

    begun = made()
    iterator = iter(begun)
    if taken:
        for _, _ in zip(range(taken), iterator):
            pass
    path = saved(tmp_path / "checkpoint", {"loader": begun, "step": 3})
    rest = [batch.tolist() for batch in (iterator if taken < 100 else begun)]
    resumed = made()
    loaded(path, {"loader": resumed, "step": 0})
    assert [batch.tolist() for batch in resumed] == rest


def shape_of(state: dict[str, Any]) -> dict[str, type]:
    return {key: type(value) for key, value in state.items()}


def test_a_state_has_one_shape(OurLoader: Any) -> None:
    shapes = []
    for name, make in SAMPLERS.items():
        for workers in (0, 2):
            loader = OurLoader(Indices(SIZE), batch_size=20, num_workers=workers, **make())
            shapes.append(shape_of(loader.state_dict()))
            shapes.extend(shape_of(loader.state_dict()) for _ in loader)
            shapes.append(shape_of(loader.state_dict()))
            if name == "objects":
                for shape in shapes[-5:]:
                    del shape["objects"]
    first = shapes[0]
    assert set(first.values()) <= {int, bool, str, type(None)}
    for shape in shapes:
        assert {key: first[key] for key in shape} == shape
        assert set(first) - set(shape) <= {"objects"}


def test_own_states_of_any_type_survive(OurLoader: Any) -> None:
    loader = OurLoader(Indices(SIZE), batch_size=4, sampler=Noted(SIZE))
    next(iterator := iter(loader))
    state = loader.state_dict()
    rest = [batch.tolist() for batch in iterator]
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    for kept in (pickle.loads(pickle.dumps(state)), torch.load(file, weights_only=False)):
        again = OurLoader(Indices(SIZE), batch_size=4, sampler=Noted(SIZE))
        again.load_state_dict(kept)
        assert [batch.tolist() for batch in again] == rest


def test_parts_of_several_ranks_states_are_refused(OurLoader: Any) -> None:
    states = []
    for steps in (2, 3):
        loader = OurLoader(Indices(SIZE), batch_size=4, **SAMPLERS["ranks"]())
        for _, _ in zip(range(steps), loader):
            pass
        states.append(loader.state_dict())
    mixed = {**states[0], "position": states[1]["position"]}
    with pytest.raises(Exception, match="put together from the states of several ranks"):
        OurLoader(Indices(SIZE), batch_size=4, **SAMPLERS["ranks"]()).load_state_dict(mixed)


#: Ranks are forked from one interpreter, which imports once. Each phase has a process group of its own.
RANKS = """
import json, os, sys, traceback, warnings
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.utils.data import DistributedSampler
from tests.loader_cases import Indices
from torch_dpflow import DPFlowDataLoader, DynaGCSSampler

warnings.simplefilter("ignore")
torch.set_num_threads(1)
SIZE, folder, kind = 103, sys.argv[1], sys.argv[2]
PHASES = json.loads(sys.argv[3])  # ranks, batch size, steps, way of saving, port


class Titan:
    '''As torchtitan's loader: each rank's state is bytes under a key of its own.'''

    def __init__(self, loader, ranks_before):
        self.loader, self.before = loader, ranks_before

    def state_dict(self):
        import pickle

        own = pickle.dumps(self.loader.state_dict())
        ranks = range(self.before) if self.before else [dist.get_rank()]  # those that are in the checkpoint
        return {f"dp_rank_{rank}": own for rank in ranks} | {"world_size": dist.get_world_size()}

    def load_state_dict(self, state):
        import pickle

        self.loader.load_state_dict([pickle.loads(state[f"dp_rank_{rank}"]) for rank in range(state["world_size"])])


def gathered(loader):
    states = [None] * dist.get_world_size()
    dist.all_gather_object(states, loader.state_dict())
    return {str(rank): state for rank, state in enumerate(states)}


def phase(number, rank, uneven):
    ranks, batch_size, steps, way, port = PHASES[number]
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo")
    made = {"DistributedSampler": DistributedSampler, "DynaGCSSampler": DynaGCSSampler}[kind]
    loader = DPFlowDataLoader(Indices(SIZE), batch_size=batch_size, sampler=made(Indices(SIZE), seed=4), num_workers=0)
    if number:
        before, _, _, kept, _ = PHASES[number - 1]
        path = f"{folder}/{number - 1}"
        if kept == "one":  # in step, any rank's state will do
            dcp.load({"loader": loader}, checkpoint_id=path)
        elif kept == "titan":
            dcp.load({"loader": Titan(loader, before)}, checkpoint_id=path)
        else:
            target = {"loaders": {str(one): loader.state_dict() for one in range(before)}}
            dcp.load(target, checkpoint_id=path)
            loader.load_state_dict([*target["loaders"].values()])
    steps += uneven * (rank % 2)
    seen = [index for _, batch in zip(range(steps), loader) for index in batch.tolist()]
    if way == "one":
        dcp.save({"loader": loader}, checkpoint_id=f"{folder}/{number}")
    elif way == "titan":
        dcp.save({"loader": Titan(loader, 0)}, checkpoint_id=f"{folder}/{number}")
    else:
        dcp.save({"loaders": gathered(loader)}, checkpoint_id=f"{folder}/{number}")
    dist.destroy_process_group()
    os.write(1, (json.dumps([number, seen]) + "\\n").encode())


for number, (ranks, *_, way, _) in enumerate(PHASES):
    children = []
    for rank in range(ranks):
        if (child := os.fork()) == 0:
            code = 1
            try:
                phase(number, rank, uneven=way != "one" and number < len(PHASES) - 1)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert codes == [0] * ranks, (number, codes)
"""


@pytest.mark.parametrize(
    ("kind", "ways"),
    [
        ("DynaGCSSampler", ("one", "titan", "gathered")),
        pytest.param("DistributedSampler", ("titan", "one", "gathered"), marks=pytest.mark.slow),
    ],
)
def test_ranks_save_and_load_at_other_world_sizes(kind: str, ways: tuple[str, ...], tmp_path: Path) -> None:
    """Under one key where ranks are in step; as torchtitan does, and gathered, where they are not."""
    sizes = [(2, 4, 3), (3, 2, 4), (1, 5, 3), (2, 8, 100)]
    phases = [[*size, way, free_port()] for size, way in zip(sizes, [*ways, "one"])]
    done = run_interpreter(RANKS, str(tmp_path), kind, json.dumps(phases))
    assert done.returncode == 0, done.stderr[-3000:]
    read = [json.loads(line) for line in done.stdout.splitlines()]
    before = [index for number, seen in read for index in seen if number < 3]
    last = [index for number, seen in read for index in seen if number == 3]
    assert len(set(before)) == len(before)
    assert set(before) | set(last) == set(range(103))
    assert len(before) + len(last) - 103 == -(103 - len(before)) % 2
