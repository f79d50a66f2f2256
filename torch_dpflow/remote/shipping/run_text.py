"""`eval` and `exec` for functions of the script in workers, which have only the variables that code reads by name."""

from __future__ import annotations

import builtins
import dis
import functools
import sys
import types
from collections.abc import Callable, Collection
from typing import Any

from torch_dpflow.errors import UsageError

#: Variables of the script; set in workers.
_script: set[str] = set()


def set_script_variables(names: Collection[str]) -> None:
    """Set which variables the script has. A text that reads one that was not sent raises UsageError."""
    _script.clear()
    _script.update(names)


def runner(name: str) -> Callable[..., Any]:
    """Return `eval` or `exec` for functions of the script."""
    return functools.partial(_run, getattr(builtins, name))


def _run(run: Callable[..., Any], source: Any, /, *scopes: Any, **options: Any) -> Any:
    frame = sys._getframe(1)
    given, inner = (*scopes, options.pop("globals", None), options.pop("locals", None))[:2]
    variables = frame.f_globals if given is None else given
    if inner is None:
        inner = variables
        if given is None:
            inner = frame.f_locals if type(frame.f_locals) is dict else dict(frame.f_locals)
    if given is None and not isinstance(source, types.CodeType):
        source = _compiled(source, run.__name__, frame.f_code.co_flags & _FUTURES)
    unsent = _script - variables.keys() - vars(builtins).keys() if given is None else ()
    if unsent:
        missing = [name for name in _read_in(source) if (name in unsent and name not in inner) or name == "globals"]
        if missing:
            raise UsageError(
                f"a text that is evaluated in a worker reads {missing[0]!r} of the script, which was not sent: workers "
                "have only the variables whose names are in the dataset's code. Name it there, or put it into the "
                "dataset"
            )
    return run(source, variables, inner, **options)


def _compiled(source: Any, mode: str, flags: int) -> Any:
    if type(source) is str:
        return _compiled_text(source.lstrip(" \t") if mode == "eval" else source, mode, flags)
    return compile(source, "<string>", mode, flags, dont_inherit=True)


@functools.lru_cache(maxsize=1 << 10)
def _compiled_text(source: str, mode: str, flags: int) -> Any:
    return compile(source, "<string>", mode, flags, dont_inherit=True)


#: Flags of `from __future__` statements.
_FUTURES = 0x1FF0000


@functools.lru_cache(maxsize=1 << 10)
def _read_in(code: types.CodeType) -> frozenset[str]:
    """Return the variables that code reads and does not set, and that are none of a function's."""
    found = {kind: set[str]() for kind in ("LOAD", "STORE")}
    for one in dis.get_instructions(code):
        kind, _, rest = one.opname.partition("_")
        if kind in found and rest in ("NAME", "GLOBAL"):
            found[kind].add(one.argval)
    inner = [_read_in(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return frozenset(found["LOAD"].union(*inner) - found["STORE"])
