"""Pairs of scripts with objects that are pickled by their names, as functions under cachetools."""

from __future__ import annotations

from tests.remote.shipping.identity_pairs import Pair, data

CACHED = """
import functools
class Cached:
    def __init__(self, f):
        functools.update_wrapper(self, f)
        self.cache = {}
    def __call__(self, i):
        return self.cache.setdefault(i, self.__wrapped__(i))
    def __reduce__(self):
        return self.__qualname__
"""
LIB = {"lib.py": f"{CACHED}@Cached\ndef f(i):\n    return i * 3\n"}
FILLED = {
    "lib.py": """
class R(dict):
    def __reduce__(self): return "REG"
class T(list):
    __slots__ = ("s",)
    def __reduce__(self): return "TAB"
class U(set):
    def __reduce__(self): return "TAGS"
REG, TAB, TAGS = R(a=1), T(), U()
TAB.s = 5
def f(): return dict(REG), [*TAB], TAB.s, sorted(TAGS)
"""
}
F = f"{CACHED}def f(i): return i * @@\nf = Cached(f)"
MISSING = "class S:\n    def __init__(self): self.v = @@\n    def __reduce__(self): return 'MISSING'\nMISSING = S()\n"
NAMED = [
    Pair("named object", "__main__.f.__wrapped__", data("f(i + 1)", F), loads=""),
    Pair("named object of a dataset", "dataset.f.__wrapped__", data("self.f(i + 1)", F, "self.f = f"), loads=""),
    Pair("sentinel", "__main__.MISSING.v", data("MISSING.v, self.m is MISSING", MISSING, "self.m = MISSING"), loads=""),
    Pair(
        "new type",
        "__main__.U.__supertype__",
        data("U.__supertype__", "U = typing.NewType('U', int if @@ == 1 else str)"),
        loads="",
    ),
    *[
        Pair(f"named {kind}", part, data(reads, f"{body}\n    def __reduce__(self): return 'R'\n{made}"), loads="")
        for kind, part, reads, body, made in [
            ("dict", "__main__.R", "R[0], R['itself'] is R", "class K(dict):", "R = K({0: @@})\nR['itself'] = R"),
            ("ordered dict", "__main__.R", "R[0]", "class K(collections.OrderedDict):", "R = K({0: @@})"),
            ("list", "__main__.R", "R[0], R[1] is R", "class K(list):", "R = K([@@])\nR.append(R)"),
            ("set", "__main__.R", "max(R)", "class K(set):", "R = K({@@})"),
            ("number", "__main__.R", "R + 0", "class K(int):", "R = K(@@)"),
            ("object with slots", "__main__.R.v", "R.v", "class K:\n    __slots__ = 'v',", "R = K()\nR.v = @@"),
            (
                "object with a state",
                "__main__.R",
                "R.v",
                "class K:\n    def __getstate__(self): return [self.v]\n    def __setstate__(self, s): self.v = s[0]",
                "R = K()\nR.v = @@",
            ),
            (
                "object that is made otherwise",
                "__main__.R.v",
                "R.v",
                "class K:\n    def __new__(cls, v): return object.__new__(cls)\n    def __init__(self, v): self.v = v",
                "R = K(@@)",
            ),
        ]
    ],
    Pair("named object of a module", "lib.f", data("lib.f(i)", "import lib"), files={"lib.py": F}),
    Pair(
        "named object of a module imported by two",
        "lib.f.cache",
        data("b.f(i)", "import lib, b\nlib.f.cache[1] = @@"),
        files={**LIB, "b.py": "from lib import f"},
    ),
    *[
        Pair(f"named object of a module: {change}", part, data("lib.f(i + 1)", f"import lib\n{change}"), files=LIB)
        for part, change in [
            ("lib.f.cache", "lib.f.cache[1] = @@"),
            ("lib.f.__wrapped__", "lib.f.__wrapped__ = lambda i: i * @@"),
            ("lib.f", "lib.f = lib.Cached(lambda i: i * @@)\nlib.f.__qualname__ = 'f'"),
            (
                "lib.f",
                "lib.f = lib.Cached(lambda i: i * @@)\nlib.f.__qualname__, lib.f.__module__ = 'f', 'lib'",
            ),
        ]
    ],
    *[
        Pair(f"named container of a module: {change}", part, data("lib.f()", f"import lib\n{change}"), files=FILLED)
        for part, change in [
            ("lib.REG", "lib.REG['b'] = @@"),
            ("lib.TAB", "lib.TAB.append(@@)"),
            ("lib.TAB.s", "lib.TAB.s = @@"),
            ("lib.TAGS", "lib.TAGS.add(@@)"),
        ]
    ],
]
USED = """
class P(typing.Protocol):
    def f(self): ...
class K(P):
    def f(self): return 2
class J(P):
    def __init__(self): self.a = 1
    def f(self): return self.a
"""
SAME_NAMED = [
    Pair("named object that was read", "[lib.f.cache]", data("lib.f(i)", "import lib", after="lib.f(@@)"), files=LIB),
    Pair("named containers", "", data("lib.f()", "import lib"), files=FILLED),
    Pair("protocol that was used", "", data("K().f()", USED, after="if @@ == 1: K(), J()"), loads=""),
    Pair(
        "protocol of a module that was used",
        "",
        data("lib.K().f()", "import lib", after="if @@ == 1: lib.K(), lib.J()"),
        files={"lib.py": f"import typing{USED}"},
    ),
]
