"""Pairs of scripts that change their own modules, and scripts whose reads raise in workers."""

from __future__ import annotations

from tests.remote.shipping.identity_pairs import VALUE, Pair, data

WRAP = "def d(f, n=@@):\n    @functools.wraps(f)\n    def h(*a): return f(*a) * n\n    return h\n"
FUNCTIONS = (
    "def f(x): return x + 1\ndef g(x): return f(x)\nclass K:\n    def m(self, x): return x + 1\n    @staticmethod\n"
    "    def s(x): return x + 1\n    @property\n    def p(self): return 3"
)
COUNTING = "C, L = 0, [0]\ndef f(x):\n    global C\n    C += 1\n    L.append(x)\n    return x"
READ = "\ndef f(t=''):\n    try: return eval({})\n    except NameError: return 7"
LABELED = """'''Doc'''
import abc
x: int = 3
L = []
M = list((1,))
N = M
def f(x: int = 1) -> 'list[int]':
    '''Doc'''
class K:
    '''Doc'''
    a: int | None = 1
    b = 2
    c = []
    def m(self, x: int): pass
a = 1
class A(abc.ABC): pass
"""
ADD = "for n in ('p', 'q') if @@ == 'a' else ('q', 'p'): setattr({}, n, 1)"
MOVE = "if @@ == 'b':\n    del {0}.a\n    {0}.a = 1"
REGISTER = "cfg.A.register({} if @@ == 'b' else {})"
ONE = "{0}, {1} = [3], [3]\nif @@ == 'b': {1} = {0}"
CHANGED = [
    Pair("computed variable set", "cfg.S", data("cfg.S", "import cfg\ncfg.S = @@"), files={"cfg.py": "S = 2**5"}),
    Pair(
        "attribute of its object set",
        "cfg.c",
        data("cfg.f()", "import cfg\ncfg.c.s = @@"),
        files={"cfg.py": "class C:\n    s = 0\nc = C()\ndef f(): return c.s"},
    ),
    Pair(
        "attribute of its namespace set, read by another module",
        "cfg.c",
        data("b.f()", "import b, cfg\ncfg.c.s = @@"),
        files={
            "cfg.py": "import types\nc = types.SimpleNamespace(s=0)",
            "b.py": "from cfg import c\ndef f(): return c.s",
        },
    ),
    Pair(
        "None set to a tensor",
        "cfg.W",
        data("cfg.f()", "import cfg\ncfg.W = torch.ones(2) * @@"),
        files={"cfg.py": "W = None\ndef f(): return W"},
    ),
    Pair("set to None", "cfg.S", data("cfg.S", "import cfg\ncfg.S = @@"), "2", "None", files={"cfg.py": "S = 3"}),
    Pair(
        "its function replaced",
        "cfg.f",
        data("cfg.g()", "import cfg\ncfg.f = lambda: @@"),
        files={"cfg.py": "def f(): return 0\ndef g(): return f()"},
    ),
    Pair(
        "its function wrapped",
        "cfg.f",
        data("cfg.g()", "import cfg\ncfg.f = functools.partial(cfg.f, @@)"),
        files={"cfg.py": "def f(i=0): return i\ndef g(): return f()"},
    ),
    Pair(
        "its method replaced",
        "cfg.K.f",
        data("cfg.K().f()", "import cfg\ncfg.K.f = lambda self: @@"),
        files={"cfg.py": "class K:\n    def f(self, by=1): return 0"},
    ),
    Pair(
        "its class replaced",
        "__main__.L.f",
        data("cfg.g()", "import cfg\nclass L(cfg.K):\n    def f(self): return @@\ncfg.K = L"),
        files={"cfg.py": "class K:\n    def f(self): return 0\ndef g(): return K().f()"},
    ),
    Pair(
        "its defaults set",
        "cfg.f(i)",
        data("cfg.f(), cfg.g()", "import cfg\ncfg.f.__defaults__ = (@@,)\ncfg.g.__kwdefaults__['j'] = @@"),
        files={"cfg.py": "def f(i=0): return i\ndef g(*, j=0): return j"},
    ),
    Pair(
        "its default filled",
        "cfg.f(k)",
        data("cfg.f()", "import cfg\ncfg.f(@@)"),
        files={"cfg.py": "def f(i=None, k=[0]):\n    if i: k.append(i)\n    return k[-1]"},
    ),
    Pair(
        "its closure set",
        "cfg.f[n]",
        data("cfg.f()", "import cfg\ncfg.s(@@)"),
        files={
            "cfg.py": "def m():\n    n = 0\n    def f(): return n\n    def s(v):\n        nonlocal n\n        n = v\n"
            "    return f, s\nf, s = m()\nf.__qualname__, s.__qualname__ = 'f', 's'"
        },
        loads="",
    ),
    Pair(
        "attribute of its function set",
        "cfg.f.p",
        data("cfg.f.p", "import cfg\ncfg.f.p = @@"),
        files={"cfg.py": "def f(): return 0\nf.p = 0"},
    ),
    Pair(
        "its code set",
        "cfg.f",
        data("cfg.f()", "import cfg\ncfg.f.__code__ = (lambda: @@).__code__"),
        files={"cfg.py": "def f(): return 0"},
    ),
    Pair(
        "its code set, and a default",
        "cfg.f",
        data("cfg.f()", "import cfg\ncfg.f.__code__ = (lambda i: i * @@).__code__\ncfg.f.__defaults__ = (3,)"),
        files={"cfg.py": "def f(i=0): return i"},
    ),
    Pair(
        "code of its method set",
        "cfg.K.f",
        data("cfg.K().f()", "import cfg\ncfg.K.f.__code__ = (lambda self: @@).__code__"),
        files={"cfg.py": "class K:\n    def f(self): return 0"},
    ),
    Pair(
        "its property replaced",
        "cfg.K.p",
        data("cfg.K().p", "import cfg\ncfg.K.p = property(lambda self: @@)"),
        files={"cfg.py": "class K:\n    @property\n    def p(self): return 0\n    @p.setter\n    def p(self, v): pass"},
    ),
    Pair(
        "its variable deleted",
        "cfg.S",
        data("getattr(cfg, 'S', 7)", "import cfg\nif @@: del cfg.S"),
        "0",
        "1",
        files={"cfg.py": "S = 3"},
    ),
    Pair(
        "its import replaced",
        "cfg.math",
        data("cfg.f()", "import cfg\ncfg.math = types.SimpleNamespace(pi=@@)"),
        files={"cfg.py": "import math\ndef f(): return math.pi"},
    ),
    Pair(
        "its imported function replaced",
        "cfg.g",
        data("cfg.f()", "import cfg\ncfg.g = lambda: @@"),
        files={"cfg.py": "from b import g\ndef f(): return g()", "b.py": "def g(): return 0"},
    ),
    Pair(
        "computed from the environment at its import",
        "cfg.S",
        data("cfg.S", "os.environ['FACTOR_OF_PAIR'] = '@@'\nimport cfg\ndel os.environ['FACTOR_OF_PAIR']"),
        files={"cfg.py": "import os\nS = float(os.environ.get('FACTOR_OF_PAIR', 7))"},
    ),
    Pair(
        "function by the environment at its import",
        "cfg.f",
        data("cfg.f()", "os.environ['FAST_OF_PAIR'] = '@@'\nimport cfg\ndel os.environ['FAST_OF_PAIR']"),
        files={
            "cfg.py": "import os\nif os.environ.get('FAST_OF_PAIR', '1') == '1':\n    def f(): return 1\n"
            "else:\n    def f(): return 2"
        },
    ),
    Pair(
        "late import, changed before",
        "pkg.sub.K",
        data("pkg.f(i)", "import pkg, pkg.sub\npkg.sub.K = @@"),
        files={"pkg/__init__.py": "def f(i):\n    from .sub import K\n    return K", "pkg/sub.py": "K = len('abc')"},
    ),
    Pair(
        "modules that import each other",
        "a_of_two.S",
        data("b_of_two.f()", "import a_of_two, b_of_two\na_of_two.S = b_of_two.K(@@)"),
        files={
            "a_of_two.py": "import b_of_two\nS = b_of_two.K(0)",
            "b_of_two.py": "class K:\n    def __init__(self, s): self.s = s\n"
            "import a_of_two\ndef f(): return a_of_two.S.s",
        },
    ),
    Pair(
        "module by a computed name",
        "pkg.plug_b.S",
        data("pkg.load('b')", "import pkg\nimport pkg.plug_b as other\nother.S = @@"),
        files={
            "pkg/__init__.py": "import importlib\ndef load(n): return importlib.import_module('pkg.plug_' + n).S",
            "pkg/plug_b.py": "S = 0",
        },
    ),
    Pair(
        "its registry filled",
        "__main__.k",
        data("cfg.R['k'](i)", "import cfg\n@cfg.register\ndef k(i): return i * @@"),
        files={"cfg.py": "R = {}\ndef register(f):\n    R[f.__name__] = f\n    return f"},
    ),
    Pair(
        "set in a thread's variables",
        "cfg.T.s",
        data("getattr(cfg.T, 's', 7)", "import cfg\ncfg.T.s = @@"),
        files={"cfg.py": "import threading\nT = threading.local()"},
    ),
    Pair(
        "others of the same value are left alone",
        "cfg.S",
        data("cfg.S, cfg.T, cfg.f(), b.A, b.B", "import b, cfg\ncfg.S = @@\ncfg.A = True"),
        files={
            "cfg.py": "S = len('abc')\nT = 3\nA = False\nB = False\ndef f(n=3): return n, B",
            "b.py": "A, B = 3, False",
        },
    ),
    Pair(
        "imports of what was set before",
        "a_set.S",
        data(
            "a_set.S, b_set.S, b_set.f(), c_set.S, c_set.g()",
            "import a_set\na_set.S = @@\na_set.g = lambda: @@\nimport b_set, c_set",
        ),
        files={
            "a_set.py": "S = 0\ndef f(): return 1\ndef g(): return 0",
            "b_set.py": "from a_set import *\ndef f(): return 2",
            "c_set.py": "from b_set import S, g",
        },
    ),
    Pair(
        "base of a class by what was set before",
        "a_set.A",
        data("z_set.K.s", "import a_set\na_set.A = a_set.@@\nimport z_set"),
        "B",
        "C",
        files={
            "a_set.py": "class A:\n    s = 1\nclass B:\n    s = 2\nclass C:\n    s = 3",
            "z_set.py": "import a_set\nclass K(a_set.A): pass",
        },
    ),
    *[
        Pair(
            f"{name} wrapped under its name", part, data(read, f"import cfg\n{WRAP}{put}", init), files={"cfg.py": file}
        )
        for name, part, read, put, file, init in [
            ("function", "cfg.f", "cfg.f(i), cfg.g(i)", "cfg.f = d(cfg.f)", FUNCTIONS, "pass"),
            ("function twice", "cfg.f", "cfg.f(i), cfg.g(i)", "cfg.f = d(d(cfg.f))", FUNCTIONS, "pass"),
            ("held function", "cfg.f", "self.f(i), self.f is cfg.f", "cfg.f = d(cfg.f)", FUNCTIONS, "self.f = cfg.f"),
            ("function cached", "cfg.f", "cfg.f(i)", "cfg.f = functools.lru_cache(d(cfg.f))", FUNCTIONS, "pass"),
            ("function that counts", "cfg.f", "cfg.f(i), cfg.C, len(cfg.L)", "cfg.f = d(cfg.f)", COUNTING, "pass"),
            ("method", "cfg.K.m", "cfg.K().m(i)", "cfg.K.m = d(cfg.K.m)", FUNCTIONS, "pass"),
            ("static method", "cfg.K.s", "cfg.K().s(i)", "cfg.K.s = staticmethod(d(cfg.K.s))", FUNCTIONS, "pass"),
            ("property", "cfg.K.p", "cfg.K().p", "cfg.K.p = property(d(cfg.K.p.fget))", FUNCTIONS, "pass"),
        ]
    ],
    Pair(
        "wrapper that reads a variable",
        "__main__.Z",
        data("cfg.f(i)", "import cfg\nZ = @@\n" + WRAP.replace("* n", "* Z").replace("@@", "1") + "cfg.f = d(cfg.f)"),
        files={"cfg.py": FUNCTIONS},
    ),
    Pair(
        "wrapped by an own decorator",
        "cfg.f",
        data("cfg.f(i)", "import cfg, deco\ncfg.f = deco.d(cfg.f, @@)"),
        files={"cfg.py": FUNCTIONS, "deco.py": f"import functools\n{WRAP}".replace("@@", "1")},
    ),
    Pair(
        "wrapped by another own module",
        "",
        data("cfg.f(i)", "import cfg, patch"),
        files={"cfg.py": FUNCTIONS, "patch.py": f"import cfg, functools\n{WRAP}cfg.f = d(cfg.f)"},
    ),
    Pair(
        "its function, by another one of its name",
        "cfg.f",
        data("cfg.g(i)", "import cfg\ndef f(x): return x * @@\nf.__module__ = 'cfg'\ncfg.f = f"),
        files={"cfg.py": FUNCTIONS},
    ),
    Pair(
        "set in a context's variable",
        "cfg.V",
        data("cfg.V.get(7)", "import cfg\ncfg.V.set(@@)"),
        files={"cfg.py": "import contextvars\nV = contextvars.ContextVar('V')"},
        loads="cfg.V has another value in the script",
    ),
    *[
        Pair(
            f"{name}, set",
            part,
            data(read, f"import abc, cfg, collections.abc\nclass S: pass\n{put}"),
            *(("'a'", "'b'") if "@@" in put else ("", "")),
            files={"cfg.py": LABELED},
        )
        for name, part, read, put in [
            (
                "annotations of a function",
                "cfg.f.__annotations__",
                "cfg.f.__annotations__",
                "cfg.f.__annotations__['x'] = @@",
            ),
            (
                "annotations of a method",
                "cfg.K.m.__an",
                "cfg.K.m.__annotations__",
                "cfg.K.m.__annotations__['x'] = @@",
            ),
            ("annotations of a class", "cfg.K.__annot", "cfg.K.__annotations__", "cfg.K.__annotations__['x'] = @@"),
            ("annotations of a module", "cfg.__annot", "cfg.__annotations__", "cfg.__annotations__['x'] = @@"),
            ("name of a function", "cfg.f.__name__", "cfg.f.__name__", "cfg.f.__name__ = @@"),
            ("qualified name of a function", "cfg.f", "cfg.f.__qualname__", "cfg.f.__qualname__ = @@"),
            ("module of a function", "cfg.f", "cfg.f.__module__", "cfg.f.__module__ = @@"),
            ("docstring of a function", "cfg.f.__doc__", "cfg.f.__doc__", "cfg.f.__doc__ = @@"),
            ("docstring of a class", "cfg.K.__doc__", "cfg.K.__doc__", "cfg.K.__doc__ = @@"),
            ("docstring of a module", "cfg.__doc__", "cfg.__doc__", "cfg.__doc__ = @@"),
            ("name of a class", "cfg.K.__name__", "cfg.K.__name__", "cfg.K.__name__ = @@"),
            ("qualified name of a class", "cfg.K", "cfg.K.__qualname__", "cfg.K.__qualname__ = @@"),
            ("order of a class", "cfg.K.(order)", "[n for n in vars(cfg.K) if n[0] != '_']", ADD.format("cfg.K")),
            ("order of a module", "cfg.(order)", "[n for n in vars(cfg) if n[0] != '_']", ADD.format("cfg")),
            ("order of a function", "cfg.f.(order)", "[*vars(cfg.f)]", ADD.format("cfg.f")),
            ("place in a class", "cfg.K.(order)", "[n for n in vars(cfg.K) if n[0] != '_']", MOVE.format("cfg.K")),
            ("place in a module", "cfg.(order)", "[n for n in vars(cfg) if n[0] != '_']", MOVE.format("cfg")),
            (
                "class of numbers registered",
                "cfg.A.(reg",
                "isinstance(1, cfg.A)",
                REGISTER.format("int", "str"),
            ),
            ("class of the script registered", "cfg.A.(reg", "isinstance(S(), cfg.A)", REGISTER.format("S", "str")),
            ("one list of two modules", "cfg.M(is)", "cfg.M.append(0), cfg.L", ONE.format("cfg.L", "cfg.M")),
            ("one list of a class", "cfg.K.c(is)", "cfg.K.c.append(0), cfg.L", ONE.format("cfg.L", "cfg.K.c")),
            ("two lists that were one", "cfg.N(is)", "cfg.N.append(0), cfg.M", "if @@ == 'b': cfg.N = list(cfg.N)"),
            ("one list of the script", "__main__.Y", "Y.append(0), X", "X, Y = [0], [0]\nif @@ == 'b': Y = X"),
        ]
    ],
    Pair("variable by a text", "__main__.V", data("f()", VALUE + READ.format("'V' + '* 2'")), loads=""),
    Pair("variables by a text", "__main__.V", data("eval('globals().get(\"V\", 7)')", VALUE), loads=""),
    Pair(
        "private attribute of a member of its enumeration",
        "cfg.E.A._s",
        data("cfg.E.A._s", "import cfg\ncfg.E.A._s = @@"),
        files={"cfg.py": "import enum\nclass E(enum.Enum):\n    A = 1\nE.A._s = 0"},
    ),
]
#: What is not compared raises where it is read in a worker.
UNREAD = [
    Pair(
        "sys.modules of the script",
        "",
        data("getattr(sys.modules['__main__'], 'V', 7)", VALUE),
        "1",
        "2",
        loads="was read from its module in a worker",
    ),
    Pair("vars of the script", "", data("vars(sys.modules[__name__]).get('V', 7)", VALUE), loads="was read from its"),
    Pair(
        "default of a variable of the script",
        "",
        data("vars(sys.modules['__main__']).setdefault('V', 7)", VALUE),
        loads="was read from its",
    ),
    Pair("text of the dataset", "", data("f(self.t)", VALUE + READ.format("t"), "self.t = 'V'"), loads="a text that"),
    Pair(
        "text of the dataset, by another name of eval",
        "",
        data("f(self.t)", VALUE + "\nrun = eval" + READ.replace("eval", "run").format("t"), "self.t = 'V'"),
        loads="a text that",
    ),
    *[
        Pair(
            f"module put in the place of {name}",
            "",
            data("f()", f"{put}\nsys.modules['b_put'] = m\nm.s = @@\ndef f():\n    import b_put\n    return b_put.s"),
            files=files,
            loads="the script has put another one",
        )
        for name, put, files in [
            ("none", "m = types.ModuleType('b_put')", {}),
            ("no other", "import cfg as m", {"cfg.py": "s = 0"}),
            ("an own one", "import cfg as m", {"cfg.py": "s = 0", "b_put.py": "s = 0"}),
        ]
    ],
    Pair("names of the script", "", data("'V' in dir(sys.modules['__main__'])", VALUE), loads="was read from its"),
    Pair(
        "import of the script",
        "",
        data("f()", VALUE + "\ndef f():\n    import __main__\n    return getattr(__main__, 'V', 7)"),
        loads="was read from its",
    ),
    Pair("all of the script", "", data("sorted(sys.modules[D.__module__].__dict__)", VALUE), loads="was read from its"),
    Pair(
        "module by a computed name, in another way",
        "",
        data("pkg.load('b')", "import pkg\nimport pkg.plug_b as other\nother.S = @@"),
        files={
            "pkg/__init__.py": "import pydoc\ndef load(n): return pydoc.locate('pkg.plug_' + n).S",
            "pkg/plug_b.py": "S = 0",
        },
        loads="no code that was sent imports it",
    ),
    Pair(
        "too large to be sent",
        "",
        data("len(cfg.T)", "import cfg\ncfg.T = bytes(5_000_000)"),
        files={"cfg.py": "T = b'a'"},
        loads="cfg.T has another value in the script",
    ),
]
