"""Pairs of scripts that send the same, or whose differences a word admits."""

from __future__ import annotations

from tests.remote.shipping.identity_pairs import BARE, Pair, data
from tests.remote.shipping.named_pairs import SAME_NAMED

#: What the scripts do before: look at samples, or make the same in another way.
PEEK = "if @@: dataset[0]; dataset[1]"
LABELS = "def make(k):\n    x = ['cat', 'dog'] * 20\n    return {}\n"
MEMO = "def memo(g):\n    kept = {}\n    def inner(i): return kept.setdefault(i, g(i))\n    return inner\nf = memo(abs)"
#: Processes that compile import three seconds longer.
COMPILED = Pair(
    "function compiled by torch",
    "",
    data("cfg.f(@@)", "import cfg"),
    "1",
    "1",
    files={"cfg.py": "import torch\n@torch.compile(backend='eager')\ndef step(x): return x\ndef f(x): return x"},
)
SAME = [
    Pair(
        "classes that refuse instance checks",
        "",
        data("cfg.f()", "import cfg\n# @@"),
        files={
            "cfg.py": "import typing\nclass A(typing.TypedDict):\n    a: int\n"
            "class B(typing.Protocol):\n    b: int = 0\ndef f(): return 1"
        },
    ),
    Pair(
        "docstring that a dataclass writes of a set's order and a function's address",
        "",
        data("cfg.C.names and i", "import cfg\n# @@"),
        files={
            "cfg.py": "import dataclasses, typing\ndef f(): pass\n@dataclasses.dataclass(frozen=True)\nclass K:\n"
            "    names: frozenset = frozenset('abcde')\n    load: typing.Callable = f\nC = K()"
        },
    ),
    Pair("comments and lines", "", "@@" + data("i"), "", "# a comment\n\n\n"),
    Pair("docstring of the class", "", data("i", inside="@@"), "'a'", "'b'"),
    Pair("docstring of a function", "", data("f(i)", "def f(i):\n    '''@@'''\n    return i")),
    Pair(
        "docstring of an own module",
        "",
        data("cfg.f(i)", "import cfg"),
        "a",
        "b",
        {"cfg.py": "'''@@'''\ndef f(i):\n    '''@@'''\n    return i\n"},
    ),
    Pair(
        "lines of an own module",
        "",
        data("cfg.f(i)", "import cfg"),
        "",
        "\n# comment\n",
        {"cfg.py": "@@class K:\n    pass\ndef f(i): return i\n"},
    ),
    Pair(
        "order of own imports",
        "[cfg.(order)]",
        data("cfg.f(i)", "import cfg"),
        "import json\nimport math",
        "import math\nimport json",
        {"cfg.py": "@@\ndef f(i): return math.pi, json\n"},
    ),
    Pair("another global", "", "LR = @@\n" + data("i")),
    Pair(
        "order of definitions",
        "",
        "@@" + data("f(g(i))"),
        "def f(i): return i\ndef g(i): return i\n",
        "def g(i): return i\ndef f(i): return i\n",
    ),
    Pair(
        "order of attributes",
        "[dataset.(order)]",
        data("i", "A = @@", after="vars(dataset).update(A)"),
        "dict(a=1, b=2)",
        "dict(b=2, a=1)",
    ),
    Pair("sets", "", data("V", "V = {'a', 'b', 'c'}, frozenset([('x', 'y'), ('z',)]), {frozenset('abc'): 1}")),
    Pair("subclass of set", "", data("V", "class K(set): pass\nV = K(['a', 'b', 'c', 'd'])")),
    Pair("set in code", "", data("str(i) in {'1', '2', '3', '4'}")),
    Pair("Fortran order", "", data("V", "V = np.array(np.arange(6).reshape(2, 3), order='@@')"), "C", "F"),
    Pair(
        "equal strings, not one",
        "",
        data("V", LABELS.format("json.loads(json.dumps(x)) if k else x") + "V = make(@@)"),
        "0",
        "1",
    ),
    Pair(
        "tuples through pickle",
        "",
        data("V", LABELS.format("[pickle.loads(pickle.dumps((s, 1))) if k else (s, 1) for s in x]") + "V = make(@@)"),
        "0",
        "1",
    ),
    Pair(
        "arrays through pickle",
        "",
        data("V", "V = [np.arange(3.0) for _ in range(3)]\nif @@: V = [pickle.loads(pickle.dumps(a)) for a in V]"),
        "0",
        "1",
    ),
    Pair(
        "copied dataset",
        "",
        data("i", "class T: pass", "self.t = T()", after="if @@: dataset = copy.deepcopy(dataset)"),
        "0",
        "1",
    ),
    Pair(
        "set-up by pickle",
        "",
        data("i", "class T: pass", "self.t = T()", after="if @@: pickle.dumps(dataset)"),
        "0",
        "1",
    ),
    Pair(
        "order of options",
        "",
        data(
            "args.a",
            "p = argparse.ArgumentParser()\np.add_argument('--a'), p.add_argument('--b')\nargs = p.parse_args(@@)",
        ),
        "['--a', '1', '--b', '2']",
        "['--b', '2', '--a', '1']",
    ),
    Pair("argument that is not read", "", data("args.size", "args = argparse.Namespace(size=1, lr=@@)")),
    Pair(
        "abstract classes",
        "",
        data(
            "K()",
            "class P(abc.ABC):\n    f = abc.abstractmethod(lambda s: 1)\nclass K(P):\n    f = 2\nisinstance(K(), P)",
        ),
    ),
    Pair("pydantic", "", data("K()", "import pydantic\nclass K(pydantic.BaseModel):\n    scale: int = 1")),
    Pair(
        "generators",
        "",
        data(
            "V.random() + self.g.random()",
            "V = random.Random(1), np.random.RandomState(2), torch.Generator().manual_seed(3)",
            "self.g = np.random.default_rng(4)",
        ),
    ),
    Pair(
        "locks",
        "",
        data("cfg.f()", "import cfg\nif @@: cfg.V[0].acquire()"),
        "0",
        "1",
        {
            "cfg.py": "import threading\nV = threading.Lock(), threading.RLock(), threading.Event()\n"
            "def f(): return len(V)"
        },
    ),
    *[
        Pair(
            f"{name} of an own module",
            "",
            data("cfg.f(i)", "import cfg\n# @@"),
            files={"cfg.py": f"import {module}\nV = {value}\ndef f(i): return i"},
        )
        for name, module, value in [
            ("executor", "concurrent.futures", "concurrent.futures.ThreadPoolExecutor(2)"),
            ("process executor", "concurrent.futures", "concurrent.futures.ProcessPoolExecutor(2)"),
            ("context variable", "contextvars", "contextvars.ContextVar('V')"),
            ("generator", "math", "(x for x in [1, 2])"),
            ("thread", "threading", "threading.Thread(target=print)"),
            ("handler", "logging", "logging.StreamHandler()"),
            ("queue", "queue", "queue.SimpleQueue()"),
            ("lock of processes", "multiprocessing", "multiprocessing.Lock()"),
            ("weak reference", "weakref, json", "weakref.ref(json.JSONDecoder)"),
            ("library", "ctypes", "ctypes.CDLL(None)"),
            ("lru_cache of a partial", "functools", "functools.lru_cache(functools.partial(len, 'ab'))"),
        ]
    ],
    Pair("classes and functions without a module", "", data("cfg.f(i)", "import cfg\n# @@"), files={"cfg.py": BARE}),
    Pair(
        "object that raises when it is asked for its class",
        "[cfg.P]",
        data("cfg.f(i)", "import cfg\n# @@"),
        files={
            "cfg.py": "class R:\n    @property\n    def __class__(self): raise RuntimeError('outside of a request')\n"
            "P = R()\ndef f(i): return i\n"
        },
    ),
    *[
        Pair(f"{name} once or twice", "", data("V", f"T = {value}\nV = {{'a': T, 'b': T if @@ == 1 else {other}}}"))
        for name, value, other in [
            ("tuple", "(1, 'a b' * int('2'))", "(*[*T],)"),
            ("string", "'a b' * int('2')", "'a b' * int('2')"),
            ("decimal", "decimal.Decimal('1.5')", "decimal.Decimal('1.5')"),
            ("number of numpy", "np.float32(1)", "np.float32(1)"),
        ]
    ],
    Pair("list in two places", "", data("V", "L = [1]\nV = {'a': L, 'b': L, 'c': [L] * 20}\n# @@")),
    Pair(
        "too large to be sent, as the file computes it",
        "",
        data("len(cfg.T)", "import cfg"),
        files={"cfg.py": "T = bytes(int('5_000_000'))"},
    ),
    Pair("logger", "", data("V.debug('x')", "V = logging.getLogger('@@')")),
    Pair("lru_cache", "", data("f(i)", "@functools.lru_cache\ndef f(i): return i", after=PEEK), "0", "1"),
    Pair(
        "cached property",
        "",
        data("self.s", inside="s = functools.cached_property(lambda self: object())", after=PEEK),
        "0",
        "1",
    ),
    Pair(
        "look at an own module's computed cache",
        "[lib.kept]",
        data("lib.f(i)", "import lib", after=PEEK),
        "0",
        "1",
        {"lib.py": "class C(dict): pass\nkept = C()\ndef f(i):\n    kept[i] = i\n    return i\n"},
    ),
    # Named, with the word that admits them.
    Pair("cache of the script", "[__main__.C]", data("C.setdefault(i, i)", "C = {}", after=PEEK), "0", "1"),
    Pair(
        "cache of an own module",
        "[lib.C]",
        data("lib.C.setdefault(i, i)", "import lib", after=PEEK),
        "0",
        "1",
        {"lib.py": "C = {}"},
    ),
    Pair(
        "counter of a class",
        "[__main__.D.n]",
        data("f(i)", "def f(i):\n    D.n += 1", inside="n = 0", after=PEEK),
        "0",
        "1",
    ),
    Pair(
        "counter of a closure",
        "[__main__.f[n]]",
        data(
            "f()",
            "def make(n):\n    def f():\n        nonlocal n\n        n += 1\n    return f\nf = make(0)",
            after=PEEK,
        ),
        "0",
        "1",
    ),
    Pair(
        "default as a cache",
        "[__main__.f(k)]",
        data("f(i)", "def f(i, k={}): return k.setdefault(i, i)", after=PEEK),
        "0",
        "1",
    ),
    Pair("counter of a function", "[__main__.f.n]", data("f()", "def f(): f.n += 1\nf.n = 0", after=PEEK), "0", "1"),
    *[
        Pair(f"look: {name}", f"[{part}]", data(body, before, after=PEEK, inside="name = 'n'"), "0", "1", files)
        for name, part, body, before, files in [
            ("key is an attribute", "__main__.C", "C.setdefault(self.name, i)", "C = {}", {}),
            ("counts in a dict", "__main__.C", "f(i)", "C = {0: 0, 1: 0}\ndef f(i): C[i] += 1", {}),
            ("counts in a list", "__main__.C", "f(i)", "C = [0] * 8\ndef f(i): C[i] += 1", {}),
            ("Counter", "__main__.C", "C.update([i])", "C = collections.Counter()", {}),
            ("defaultdict", "__main__.C", "C[i].append(i)", "C = collections.defaultdict(list)", {}),
            ("OrderedDict", "__main__.C", "C.setdefault(i, i)", "C = collections.OrderedDict()", {}),
            ("set", "__main__.C", "C.add(i)", "C = set()", {}),
            ("object", "__main__.C.n", "f()", "class S: n = 0\nC = S()\ndef f(): C.n += 1", {}),
            ("another class", "__main__.S.n", "f()", "class S: n = 0\ndef f(): S.n += 1", {}),
            ("cache of a class", "__main__.K.c", "K.c.setdefault(i, i)", "class K: c = {}", {}),
            ("memo", "__main__.f[kept]", "f(i)", MEMO, {}),
            ("namespace", "__main__.C.n", "f()", "C = types.SimpleNamespace(n=0)\ndef f(): C.n += 1", {}),
            ("count", "__main__.C", "next(C)", "import itertools\nC = itertools.count()", {}),
            ("tensor", "__main__.C", "f(i)", "C = torch.zeros(8)\ndef f(i): C[i] += 1", {}),
            ("own counter", "lib.N", "lib.f()", "import lib", {"lib.py": "N = 0\ndef f():\n    global N\n    N += 1"}),
            ("own class", "lib.S.n", "lib.f()", "import lib", {"lib.py": "class S: n = 0\ndef f(): S.n += 1"}),
            ("own default", "lib.f", "lib.f(i)", "import lib", {"lib.py": "def f(i, kept={}): kept[i] = i"}),
            (
                "own generator",
                "lib.R",
                "lib.R.random()",
                "import lib",
                {"lib.py": "import random\nR = random.Random(3)"},
            ),
        ]
    ],
    Pair("flag", "[__main__.W]", data("f()", "W = False\ndef f():\n    global W\n    W = True", after=PEEK), "0", "1"),
    Pair("recent ones", "[__main__.L]", data("L.append(i)", "L = collections.deque(maxlen=4)", after=PEEK), "0", "1"),
    Pair(
        "counts in an array", "[__main__.N]", data("f(i)", "N = np.zeros(8)\ndef f(i): N[i] += 1", after=PEEK), "0", "1"
    ),
    Pair("annotations", "[__main__.f.__annotations__]", data("f(i)", "def f(i@@): return i"), "", ": int"),
    Pair(
        "another function of an own module",
        "[cfg.other]",
        data("cfg.f(i)", "import cfg"),
        files={"cfg.py": "def f(i): return i\ndef other(): return @@\n"},
    ),
    Pair(
        "a submodule that is loaded at its first use",
        "",
        data("pkg_lazy.late.f(i)", "import pkg_lazy", after=PEEK),
        "0",
        "1",
        files={
            "pkg_lazy/__init__.py": "def __getattr__(name):\n    from importlib import import_module\n"
            "    return import_module(f'pkg_lazy.{name}')\n",
            "pkg_lazy/late.py": "def f(i): return i\n",
        },
    ),
    Pair(
        "a cache of types",
        "",
        data("f(i), f('a')", "@functools.singledispatch\ndef f(x): return f(1)\nf.register(int, abs)", after=PEEK),
        "0",
        "1",
    ),
    Pair(
        "a salt in a generated hash",
        "",
        data(
            "V.n",
            "space = {'__name__': __name__}\n"
            "exec(compile(f'def __hash__(self): return hash(({hash(chr(97))}, self.n))', '<made>', 'exec'), space)\n"
            "class K:\n    n = 1\n    __hash__ = space['__hash__']\nV = K()",
        ),
    ),
    Pair(
        "an object that is sent as None",
        "",
        data(
            "i",
            "class H(int):\n    def __reduce__(self): return type(None), ()",
            "self.h = None",
            "dataset.h = H(@@) or None",
        ),
        "0",
        "1",
    ),
    *SAME_NAMED,
]
