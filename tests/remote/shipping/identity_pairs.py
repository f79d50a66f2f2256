"""Pairs of scripts whose datasets are sent to a flow's workers, and which part of what is sent differs."""

from __future__ import annotations

from typing import NamedTuple


class Pair(NamedTuple):
    """Two scripts: `@@` is `one` or `other` in them. part: what differs; empty: nothing; in brackets: only that."""

    name: str
    part: str
    script: str
    one: str = "1"
    other: str = "2"
    files: dict[str, str] = {}


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
    Pair(
        "argument that is read", "__main__.args.size", data("args.size", "args = argparse.Namespace(size=@@, lr=0.1)")
    ),
    Pair(
        "argument of the dataset",
        "dataset.o.size",
        data("getattr(self.o, 'size')", "o = argparse.Namespace(size=@@)", "self.o = o"),
    ),
]
#: What the scripts do before: look at samples, or make the same in another way.
PEEK = "if @@: dataset[0]; dataset[1]"
LABELS = "def make(k):\n    x = ['cat', 'dog'] * 20\n    return {}\n"
SAME = [
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
        "",
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
        "",
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
        data("V", "V = [np.arange(3.0)] * 3\nif @@: V = [pickle.loads(pickle.dumps(a)) for a in V]"),
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
        data("V.random() + self.g.random()", "V = random.Random(@@)", "self.g = np.random.default_rng()"),
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
        "",
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
]
