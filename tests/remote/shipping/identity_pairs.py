"""Pairs of scripts whose datasets are sent to a flow's workers, and which part of what is sent differs."""

from __future__ import annotations

from typing import NamedTuple


class Pair(NamedTuple):
    """Two scripts: `@@` is `one` or `other` in them. part: what differs; empty: any part,
    or in `SAME` nothing; in brackets: only that.

    A pair with files, or that `loads`, is also loaded in a worker: `loads` is the error there, or empty for the samples
    that the script has.
    """

    name: str
    part: str
    script: str
    one: str = "1"
    other: str = "2"
    files: dict[str, str] = {}
    loads: str | None = None

    @property
    def is_run(self) -> bool:
        """Whether it is loaded in a worker."""
        return bool(self.files) or self.loads is not None


def data(body: str, before: str = "", init: str = "pass", after: str = "", inside: str = "pass") -> str:
    return f"""{before}
class D(Dataset):
    {inside}
    def __init__(self):
        {init}
    def __len__(self):
        return 8
    def __getitem__(self, i):
        return {body}
dataset = D()
{after}
"""


#: Classes and functions without a module, or that hold themselves, or without a `__qualname__`.
BARE = """import functools
def bare(text):
    variables = {}
    exec(text, variables)
    return variables["K"]
K = bare("K = type('K', (), {'s': 0, 'f': lambda self: self.s})")
V = bare("K = type('K', (), {'s': 0})")()
def f(a=0): return a
f.__module__ = None
c = functools.lru_cache(functools.partial(f, 0))
class S:
    __slots__ = ("a",)
S.d = S()
S.d.a = 0
"""
CFG = {"cfg.py": "SCALE = @@\ndef f(i):\n    return i * SCALE\n"}
BY_PATH = """
import importlib.util
spec = importlib.util.spec_from_file_location("cfg_by_path", "cfg.py")
m = importlib.util.module_from_spec(spec)
spec.loader.exec_module(m)
"""
NEVER = "__main__.V"
VALUE = "V = @@"
DIFFER = [
    Pair("module beside data", "dataset.s", data("i * self.s", VALUE, "self.np, self.s = np, V")),
    Pair("memoryview", "dataset.v", data("self.v[0]", VALUE, "self.v = memoryview(bytes([V, 5]))")),
    Pair("view of a dict", "dataset.n", data("self.n", VALUE, "self.n = {'a': V}.values()")),
    Pair("open text file", "dataset.s", data("i", VALUE, "self.f, self.s = open('x.txt'), V"), files={"x.txt": "x"}),
    Pair(
        "logger adapter", "dataset.s", data("i", VALUE, "self.l, self.s = logging.LoggerAdapter(logging.root, {}), V")
    ),
    Pair("generic alias", "dataset.s", data("i * self.s", VALUE, "self.t, self.s = list[int], V")),
    Pair(
        "make_dataclass",
        "dataset.c.scale",
        data("i", VALUE + "\nK = dataclasses.make_dataclass('K', ['scale'])", "self.c = K(V)"),
    ),
    Pair("exec", "__main__.ns['f']", data("ns['f'](i)", "ns = {}\nexec('def f(i): return i * @@', ns)")),
    Pair("module by path: function", "__main__.m.f", data("m.f(i)", BY_PATH), files={"cfg.py": "def f(i): return @@"}),
    Pair("module by path: variable", "__main__.m.SCALE", data("m.SCALE", BY_PATH), files=CFG),
    Pair("runpy", "__main__.ns['SCALE']", data("ns['f'](i)", "import runpy\nns = runpy.run_path('cfg.py')"), files=CFG),
    Pair(
        "class of numpy by its word",
        "__main__.K.f",
        data("K().f(i)", "class K:\n    def f(self, i): return @@\nK.__module__ = 'numpy'"),
    ),
    Pair("own module as attribute", "cfg.SCALE", data("self.c.SCALE", "import cfg", "self.c = cfg"), files=CFG),
    Pair("getattr of a module", "cfg.SCALE", data("getattr(cfg, self.n)", "import cfg", "self.n = 'SCALE'"), files=CFG),
    Pair("vars of a module", "cfg.SCALE", data("vars(cfg)['SCALE']", "import cfg"), files=CFG),
    Pair("module as default", "cfg.SCALE", data("h(i)", "import cfg\ndef h(i, c=cfg): return c.SCALE"), files=CFG),
    Pair(
        "module in a closure",
        "cfg.SCALE",
        data("h(i)", "import cfg\nh = (lambda c: lambda i: c.SCALE)(cfg)"),
        files=CFG,
    ),
    Pair("module in a dict", "cfg.SCALE", data("M['c'].SCALE", "import cfg\nM = {'c': cfg}"), files=CFG),
    Pair(
        "module set by the script",
        "cfg.SCALE",
        data("cfg.SCALE", "import cfg\ncfg.SCALE = @@"),
        files={"cfg.py": "SCALE = 0"},
    ),
    Pair(
        "attribute of its class set",
        "cfg.K.s",
        data("cfg.K.s", "import cfg\ncfg.K.s = @@"),
        files={"cfg.py": "class K:\n    s = 0"},
    ),
    Pair(
        "its dict filled", "cfg.O['s']", data("cfg.O", "import cfg\ncfg.O['s'] = @@"), files={"cfg.py": "O = {'s': 0}"}
    ),
    Pair(
        "namespace package",
        "pkg.sub.f",
        data("pkg.sub.f(i)", "import pkg.sub"),
        files={"pkg/sub.py": "def f(i): return @@"},
    ),
    Pair(
        "late import",
        "pkg.sub.K",
        data("pkg.f(i)", "import pkg"),
        files={"pkg/__init__.py": "def f(i):\n    from .sub import K\n    return K", "pkg/sub.py": "K = @@"},
    ),
    Pair(
        "__getattr__ of a module",
        "cfg.__getattr__",
        data("cfg.X", "import cfg"),
        files={"cfg.py": "def __getattr__(n):\n    if n == 'X':\n        return @@\n    raise AttributeError(n)"},
    ),
    Pair("globals() in nested code", NEVER, data("sum(globals().get('V', 7) for _ in [0])", VALUE)),
    Pair("__globals__", NEVER, data("D.__len__.__globals__.get('V', 7)", VALUE)),
    Pair("f_globals", NEVER, data("sys._getframe().f_globals.get('V', 7)", VALUE)),
    Pair(
        "docstring that is returned",
        "__main__.D.name",
        data("i", inside="def name(self):\n        '@@'\n        return '@@'"),
    ),
    Pair(
        "state of two dicts",
        "dataset",
        data(
            "i",
            inside="def __getstate__(self): return {'a': @@}, {'a': 0}\n    def __setstate__(self, s): self.s = s",
        ),
    ),
    Pair(
        "state of two dicts that pickle sets",
        "dataset",
        data("i", inside="def __reduce__(self): return D, (), ({'a': 0}, {'a': @@})"),
    ),
    Pair(
        "attribute of a parameter",
        "dataset.p",
        data("i", init="self.p = torch.nn.Parameter(torch.ones(2)); self.p.k = @@"),
    ),
    Pair("globals()", NEVER, data("globals()['V']", VALUE)),
    Pair(
        "class body in a function",
        NEVER,
        data("make().s", VALUE + "\ndef make():\n    class K:\n        s = V\n    return K"),
    ),
    Pair("add of a tensor", NEVER, data("V.add(i)", "V = torch.tensor(@@)")),
    Pair(
        "own object with pop",
        "__main__.T.n",
        data("T.pop(i)", "class A:\n    def pop(self, i): return self.n\nT = A(); T.n = @@"),
    ),
    Pair(
        "counter and scale",
        "__main__.S['scale']",
        data("f(i)", "S = {'seen': 0, 'scale': @@}\ndef f(i):\n    S['seen'] = i\n    return S['scale']"),
    ),
    Pair(
        "loaded later", NEVER, data("f()", VALUE + "\nT = None\ndef f():\n    global T\n    T = T or V\n    return T")
    ),
    Pair("keyword only", "__main__.f", data("f(i, 2)", "def f(a, @@b=1): return a * b"), "", "*, "),
    Pair("star of a lambda", "__main__.f", data("f(i)", "f = lambda @@x: x"), "", "*"),
    Pair(
        "exception table",
        "__main__.f",
        data("f(i)", "def f(i):\n@@    return 0\n"),
        "    try:\n        len('a'); g = i\n    except ValueError:\n        return 1\n",
        "    try:\n        len('a')\n    except ValueError:\n        return 1\n    g = i\n",
    ),
    Pair("attribute of a function", "__main__.f.p", data("f.p", "def f(i): return i\nf.p = @@")),
    Pair(
        "partialmethod",
        "__main__.T.go.keywords['by']",
        data("T().go(i)", "class T:\n    def up(self, i, by): return by\n    go = functools.partialmethod(up, by=@@)"),
    ),
    Pair(
        "wrapped method",
        "__main__.D.__getitem__[n]",
        data("i", after="D.__getitem__ = (lambda old, n: lambda self, i: old(self, i) * n)(D.__getitem__, @@)"),
    ),
    Pair(
        "metaclass",
        "__main__.M.__call__",
        data("K()", "class M(type):\n    def __call__(cls): return @@\nclass K(metaclass=M): pass"),
    ),
    Pair(
        "order of bases",
        "__main__.K",
        data("K.s", "class A:\n    s = 1\nclass B:\n    s = 2\nclass K(@@): pass"),
        "A, B",
        "B, A",
    ),
    Pair("enum", "__main__.E", data("E.A.value", "class E(enum.Enum):\n    A = @@")),
    Pair(
        "default of a named tuple",
        "__main__.K._field_defaults['a']",
        data("K()", "K = collections.namedtuple('K', 'a', defaults=[@@])"),
    ),
    Pair(
        "descriptor",
        "__main__.P.__get__",
        data("self.s", "class P:\n    def __get__(self, o, t): return @@", inside="s = P()"),
    ),
    Pair("property", "__main__.D.s", data("self.s", inside="s = property(lambda self: @@)")),
    Pair(
        "value of a cached property",
        "__main__.D.s",
        data("self.s", inside="s = functools.cached_property(lambda self: @@)"),
    ),
    Pair("mutable default", "__main__.f(s)", data("f(i)", "def f(i, s=[@@]): return s[0]")),
    Pair("int and float", "__main__.D.__getitem__", data("[i, @@]"), "1", "1.0"),
    Pair(
        "chain of 300 functions",
        "__main__.f300",
        data("f0(i)", "\n".join(f"def f{n}(i): return f{n + 1}(i)" for n in range(300)) + "\ndef f300(i): return @@"),
    ),
    Pair(
        "chain of 100 classes",
        "__main__.K100.f",
        data(
            "K0().f(i)",
            "\n".join(f"class K{n}:\n    def f(self, i): return K{n + 1}().f(i)" for n in range(100))
            + "\nclass K100:\n    def f(self, i): return @@",
        ),
    ),
    Pair("list in a list, 3000 deep", NEVER, data("V", "V = [@@]\nfor _ in range(3000): V = [V]")),
    Pair(
        "dict with __missing__",
        "__main__.K.__missing__",
        data("self.d[9]", "class K(dict):\n    def __missing__(self, k): return @@", "self.d = K()"),
    ),
    Pair("set and frozenset", NEVER, data("V", "V = @@([1])"), "set", "frozenset"),
    Pair("a sample in a million", NEVER, data("V[i]", "V = [str(n) for n in range(100_000)]; V[77_777] = '@@'")),
    Pair("a pair in many", NEVER, data("V[i]", "V = [(str(n), n % 7) for n in range(10_000)]; V[777] = ('a', @@)")),
    Pair(
        "an object in many",
        NEVER,
        data(
            "V[i].a",
            "class K:\n    def __init__(self, a): self.a = a\nV = [K(n) for n in range(1_000)]; V[77].a = 'x@@'",
        ),
    ),
    Pair(
        "rings of objects",
        NEVER,
        data("V", "class K: pass\nV = [K() for _ in range(100)]\nfor n, k in enumerate(V): k.next, k.v = V[n - @@], 0"),
    ),
    Pair(
        "weight of a module",
        "__main__.M._parameters['weight']",
        data(
            "M", "M = torch.nn.Linear(1, 1); torch.nn.init.constant_(M.weight, @@); torch.nn.init.constant_(M.bias, 0)"
        ),
    ),
    Pair("storage", NEVER, data("V", "V = (torch.ones(2) * @@).untyped_storage()")),
    Pair("quantized", NEVER, data("V", "V = torch.quantize_per_tensor(torch.zeros(3), 0.@@, 0, torch.quint8)")),
    Pair("object array", NEVER, data("V", "V = np.array([{'a': @@}, None], dtype=object)")),
    Pair("strings of numpy", NEVER, data("V", "V = np.array(['x@@'], dtype=np.dtypes.StringDType())")),
    Pair("default dict's factory", NEVER, data("V[1]", "V = collections.defaultdict(lambda: @@)")),
    # Orders that code can follow.
    Pair(
        "order of attributes that is followed",
        "dataset.(order)",
        data("[*vars(self).values()]", "A = @@", after="vars(dataset).update(A)"),
        "dict(a=1, b=2)",
        "dict(b=2, a=1)",
        loads="",
    ),
    Pair(
        "order of a state",
        "dataset.(order)",
        data(
            "self.s",
            inside="def __getstate__(self): return @@\n    def __setstate__(self, s): self.s = [*s.values()]",
            after="dataset.s = [*dataset.__getstate__().values()]",
        ),
        "dict(a=1, b=2)",
        "dict(b=2, a=1)",
        loads="",
    ),
    Pair(
        "order of a namespace",
        "__main__.V.(order)",
        data("[*vars(V).values()]", "V = types.SimpleNamespace(@@)"),
        "a=1, b=2",
        "b=2, a=1",
        loads="",
    ),
    Pair(
        "order of many namespaces",
        NEVER,
        data("[*vars(V[i]).values()]", "V = [types.SimpleNamespace(@@) for _ in range(20)]"),
        "a=1, b=2",
        "b=2, a=1",
        loads="",
    ),
    Pair(
        "order of a class",
        "__main__.K.(order)",
        data("[k for k in vars(K) if k in 'ab']", "class K:\n    @@"),
        "a = 1; b = 2",
        "b = 2; a = 1",
        loads="",
    ),
    Pair(
        "order of methods",
        "__main__.K.(order)",
        data(
            "[f() for n, f in vars(K).items() if n in 'fg']",
            "class K:\n    @@",
        ),
        "f = lambda: 1\n    g = lambda: 2",
        "g = lambda: 2\n    f = lambda: 1",
        loads="",
    ),
    Pair(
        "order of an own module",
        "cfg",
        data("[v for k, v in vars(cfg).items() if k in 'ab']", "import cfg"),
        "a = 1\nb = 2",
        "b = 2\na = 1",
        files={"cfg.py": "@@"},
    ),
    Pair(
        "order of arguments",
        "dataset.a.(order)",
        data("[*vars(self.a).values()]", "A = @@", "self.a = argparse.Namespace(**A); self.size, self.lr = 0, 0"),
        "dict(size=1, lr=2)",
        "dict(lr=2, size=1)",
        loads="",
    ),
    # Random generators.
    Pair("seed of a generator", "dataset.g", data("self.g.random()", init="self.g = random.Random(@@)")),
    Pair("seed of numpy's generator", "dataset.g", data("self.g.random()", init="self.g = np.random.default_rng(@@)")),
    Pair(
        "seed of torch's generator",
        "dataset.g",
        data("self.g.initial_seed()", init="self.g = torch.Generator().manual_seed(@@)"),
        loads="",
    ),
    Pair(
        "seeds in many objects",
        NEVER,
        data("V[i].g.random()", "class K: pass\nV = [K() for _ in range(20)]\nfor k in V: k.g = random.Random(@@)"),
    ),
    Pair(
        "argument that is read", "__main__.args.size", data("args.size", "args = argparse.Namespace(size=@@, lr=0.1)")
    ),
    Pair(
        "argument of the dataset",
        "dataset.o.size",
        data("getattr(self.o, 'size')", "o = argparse.Namespace(size=@@)", "self.o = o"),
    ),
]
