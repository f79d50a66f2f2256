"""Digests of code objects, independent of line numbers, files, docstrings, and addresses in generated names."""

from __future__ import annotations

import dis
import functools
import re
import sys
import types
from collections.abc import Callable
from typing import Any

from torch_dpflow.remote.shipping.part_tree import digest_of

#: A number in a name that can be a memory address.
ADDRESS = re.compile(r"\d{9,}")
_WORD = re.compile(r"[^\W\d]\w*")


def code_digest(code: types.CodeType, names: set[str], rename: Callable[[str], str] = str) -> bytes:
    """Return the digest of code without line numbers, file and docstring; add the names in the code to `names`.

    rename: returns the name to digest in place of a name, which may contain a memory address.
    """
    if rename is str or not any(map(ADDRESS.search, (*code.co_names, *code.co_varnames))):
        digest, used = _code(code)
        names |= used
        return digest
    renamed = [tuple(map(rename, one)) for one in (code.co_names, code.co_varnames)]
    digest, used = _code(code.replace(co_names=renamed[0], co_varnames=renamed[1]))
    names |= used
    return digest


def source_digest(code: types.CodeType, names: set[str]) -> bytes:
    """Return `code_digest(code, names)` without a cache, which would keep 100 kB for each module."""
    digest, used = _computed(code, source_digest)
    names |= used
    return digest


#: Flags: the code is that of a function, and of one with a docstring (since Python 3.14).
_IS_FUNCTION, _HAS_DOCSTRING = 0x3, 0x4000000


@functools.lru_cache(maxsize=1 << 14)
def _code(code: types.CodeType) -> tuple[bytes, frozenset[str]]:
    digest, names = _computed(code, code_digest)
    return digest, frozenset(names)


def _computed(code: types.CodeType, inner: Callable[[types.CodeType, set[str]], bytes]) -> tuple[bytes, set[str]]:
    """Return the digest of code, and the names in it. inner: returns the digest of code inside it, and adds names."""
    constants = list(code.co_consts)
    has_docstring = code.co_flags & _HAS_DOCSTRING if sys.version_info >= (3, 14) else True
    named = code.co_flags & _IS_FUNCTION == _IS_FUNCTION and not code.co_name.startswith("<")
    if named and has_docstring and constants and isinstance(constants[0], str) and not _reads_first(code):
        constants[0] = None
    if code.co_name == "__hash__" and code.co_filename.startswith("<"):
        constants = [None if _is_salt(one) else one for one in constants]
    names = {*code.co_names, *code.co_freevars}
    pieces = [_constant(one, names, inner) for one in constants]
    shape = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags & ~_HAS_DOCSTRING)
    labels = (code.co_name, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    table = getattr(code, "co_exceptiontable", b"")
    return digest_of(code.co_code, table, repr((shape, labels)).encode(), *pieces), names


def _is_salt(constant: Any) -> bool:
    """Return whether a constant is a hash of a text in generated code, as attrs makes it: it differs by process."""
    values = constant if type(constant) is tuple else (constant,)
    return any(type(one) is int and one.bit_length() > 32 for one in values)


def _reads_first(code: types.CodeType) -> bool:
    """Return whether code reads its first constant, which is then a value as well as the docstring."""
    raw = code.co_code
    return any(
        raw[at] in dis.hasconst and raw[at + 1] == 0 and (raw[at - 2] if at else 0) != dis.EXTENDED_ARG
        for at in range(0, len(raw), 2)
    )


def names_in_code(code: types.CodeType) -> frozenset[str]:
    """Return `co_names`, `co_freevars` and string constants, except functions' docstrings, of code and inner code."""
    return _code(code)[1]


@functools.lru_cache(maxsize=1 << 10)
def names_in_texts(code: types.CodeType) -> frozenset[str]:
    """Return the words in `names_in_code(code)`: with `eval`, the code can read variables that its texts name."""
    return frozenset(word for text in names_in_code(code) for word in _WORD.findall(text))


def _constant(value: Any, names: set[str], inner: Callable[[types.CodeType, set[str]], bytes]) -> bytes:
    if isinstance(value, types.CodeType):
        return inner(value, names)
    if isinstance(value, tuple):
        return digest_of(b"tuple", *(_constant(one, names, inner) for one in value))
    if isinstance(value, frozenset):
        return digest_of(b"set", *sorted(_constant(one, names, inner) for one in value))
    if isinstance(value, str):
        names.add(value)
    return digest_of(type(value).__name__.encode(), repr(value).encode(errors="surrogatepass"))
