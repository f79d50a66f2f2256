"""Pairs of scripts as a hostile user writes them: nearly equal values, and objects that hide what they hold."""

# ruff: noqa: E501

from __future__ import annotations

from tests.remote.shipping.identity_pairs import BARE, Pair, data


def hostile(
    name: str,
    body: str,
    before: str = "",
    one: str = "1",
    other: str = "2",
    files: dict[str, str] | None = None,
    loads: str = "",
) -> Pair:
    """Two scripts with other samples, of which a worker has those of the script."""
    return Pair(name, "", data(body, before), one, other, files or {}, loads)


HOSTILE = [
    hostile(
        "default of a context variable",
        "cfg.V.get()",
        "os.environ['ADVX']='@@'\nimport cfg\ndel os.environ['ADVX']",
        files={"cfg.py": "import contextvars, os\nV = contextvars.ContextVar('V', default=os.environ.get('ADVX', 7))"},
        loads="cfg.V has another value",
    ),
    hostile("metaclass attr", "K.s", "class M(type):\n    s=@@\nclass K(metaclass=M): pass"),
    hostile("init_subclass", "K.s", "class B:\n    def __init_subclass__(cls, s=0): cls.s=s\nclass K(B, s=@@): pass"),
    hostile("dataclass default", "K().a", "@dataclasses.dataclass\nclass K:\n    a: int = @@"),
    hostile(
        "dataclass factory",
        "K().a",
        "@dataclasses.dataclass\nclass K:\n    a: list = dataclasses.field(default_factory=lambda: [@@])",
    ),
    hostile("frozen slots", "K().a", "@dataclasses.dataclass(frozen=True, slots=True)\nclass K:\n    a: int = @@"),
    hostile("enum order", "[*E]", "class E(enum.Enum):\n    @@", one="A=1; B=2", other="B=2; A=1"),
    hostile("flag of integers", "E.A|E.B", "class E(enum.IntFlag):\n    A=1\n    B=@@*2"),
    hostile(
        "closure mod", "f()", "import cfg\ndef mk(m):\n    return lambda: m.S\nf=mk(cfg)", files={"cfg.py": "S=@@"}
    ),
    hostile(
        "decorator",
        "f(i)",
        "def d(n):\n    def w(g):\n        @functools.wraps(g)\n        def h(i): return g(i)*n\n        return h\n    return w\n@d(@@)\ndef f(i): return i+1",
    ),
    hostile(
        "decorator own",
        "cfg.f(i)",
        "import cfg",
        files={
            "cfg.py": "import functools\ndef d(n):\n    def w(g):\n        @functools.wraps(g)\n        def h(i): return g(i)*n\n        return h\n    return w\n@d(@@)\ndef f(i): return i+1"
        },
    ),
    hostile(
        "decorator own changed",
        "cfg.f(i)",
        "import cfg\ncfg.f.__closure__[1].cell_contents=@@",
        files={
            "cfg.py": "import functools\ndef d(n):\n    def w(g):\n        @functools.wraps(g)\n        def h(i): return g(i)*n\n        return h\n    return w\n@d(5)\ndef f(i): return i+1"
        },
    ),
    hostile(
        "decorator own orig",
        "cfg.f(i)",
        "import cfg\ncfg.f.__wrapped__.__defaults__=(@@,)",
        files={
            "cfg.py": "import functools\ndef d(g):\n    @functools.wraps(g)\n    def h(i): return g(i)\n    return h\n@d\ndef f(i, k=5): return i+k"
        },
    ),
    hostile(
        "env at import",
        "cfg.S",
        "os.environ['ADVX']='@@'\nimport cfg\ndel os.environ['ADVX']",
        files={"cfg.py": "import os\nS = 'x' if os.environ.get('ADVX')=='1' else 'y'"},
    ),
    hostile(
        "conditional import",
        "cfg.f()",
        "os.environ['ADVX']='@@'\nimport cfg\ndel os.environ['ADVX']",
        files={
            "cfg.py": "import os\nif os.environ.get('ADVX')=='1':\n    from adva import f\nelse:\n    from advb import f",
            "adva.py": "def f(): return 1",
            "advb.py": "def f(): return 2",
        },
    ),
    hostile(
        "conditional literal",
        "cfg.S",
        "os.environ['ADVX']='@@'\nimport cfg\ndel os.environ['ADVX']",
        files={"cfg.py": "import os\nS = 1\nif os.environ.get('ADVX')=='2':\n    S = 2"},
    ),
    hostile(
        "reload",
        "cfg.S",
        "import cfg\ncfg.S=5\nos.environ['ADVX']='@@'\nimportlib.reload(cfg)\ndel os.environ['ADVX']",
        files={"cfg.py": "import os\nif os.environ.get('ADVX','1')=='2': S=3\nS = globals().get('S', 1)"},
    ),
    hostile("exec own", "cfg.f()", "import cfg", files={"cfg.py": "exec('def f(): return @@')"}),
    hostile(
        "exec own by env",
        "cfg.f()",
        "os.environ['ADVX']='@@'\nimport cfg\ndel os.environ['ADVX']",
        files={"cfg.py": "import os\nexec('def f(): return '+os.environ.get('ADVX','7'))"},
    ),
    hostile(
        "exec class by env",
        "cfg.K().f()",
        "os.environ['ADVX']='@@'\nimport cfg\ndel os.environ['ADVX']",
        files={"cfg.py": "import os\nexec('class K:\\n    def f(self): return '+os.environ.get('ADVX','7'))"},
    ),
    hostile("namedtuple", "K().a", "class K(typing.NamedTuple):\n    a: int = @@"),
    hostile("np scalar struct", "V['a']", "V=np.array([(@@,2.0)],dtype=[('a','i4'),('b','f8')])[0]"),
    hostile(
        "requires grad",
        "V.requires_grad",
        "V=torch.nn.Parameter(torch.ones(1),requires_grad=bool(@@))",
        one="0",
        other="1",
    ),
    hostile("tensor requires grad", "V.requires_grad", "V=torch.ones(1).requires_grad_(bool(@@))", one="0", other="1"),
    hostile(
        "neg zero",
        "math_copysign(V)",
        "import math\nV=@@\ndef math_copysign(v): return math.copysign(1,v)",
        one="0.0",
        other="-0.0",
    ),
    hostile("neg zero arr", "np.signbit(V)", "V=np.array([@@])", one="0.0", other="-0.0"),
    hostile("nan payload", "V.view(np.int64)", "V=np.array([0x7ff8000000000000+@@],dtype=np.int64).view(np.float64)"),
    hostile(
        "nan payload float",
        "np.array([V]).view(np.int64)",
        "import struct\nV=struct.unpack('<d', struct.pack('<q', 0x7ff8000000000000+@@))[0]",
    ),
    hostile("bool int", "[V]", "V=@@", other="True"),
    hostile("dict key bool", "[*V]", "V={@@: 0}", other="True"),
    hostile("list int float", "V", "V=[@@]*20", other="1.0"),
    hostile(
        "str subclass", "type(V).__name__", "class S(str): pass\nclass T(str): pass\nV=@@('a')", one="S", other="T"
    ),
    hostile("odict order", "V", "V=collections.OrderedDict(@@)", one="[('a',1),('b',2)]", other="[('b',2),('a',1)]"),
    hostile("counter order", "[*V]", "V=collections.Counter(@@)", one="'ab'", other="'ba'"),
    hostile("defaultdict", "V['x']", "V=collections.defaultdict(@@)", one="int", other="list"),
    hostile("chainmap", "V['a']", "V=collections.ChainMap(*@@)", one="({'a':1},{'a':2})", other="({'a':2},{'a':1})"),
    hostile("mixed frozenset", "sorted(map(str,V))", "V=frozenset(['a',1,(2,),@@])", one="None", other="3.5"),
    hostile("re flags", "bool(V.match('A'))", "V=re.compile('a', @@)", one="0", other="re.I"),
    hostile("decimal ctx", "V.divide(1,3)", "V=decimal.Context(prec=@@)", one="3", other="5"),
    hostile("decimal", "V", "V=decimal.Decimal('@@')", one="1.0", other="1.00"),
    hostile("fold", "V.fold", "V=datetime.datetime(2020,1,1,fold=@@)", one="0", other="1"),
    hostile("tz", "V.tzinfo", "V=datetime.datetime(2020,1,1,tzinfo=datetime.timezone(datetime.timedelta(hours=@@)))"),
    hostile("path kind", "type(V).__name__", "V=pathlib.@@('a')", one="PurePosixPath", other="PureWindowsPath"),
    hostile(
        "memmap",
        "V[0]",
        "np.arange(8,dtype=np.int16).tofile('m.bin')\nV=np.memmap('m.bin',np.int16,'r',offset=2*@@,shape=(2,))",
    ),
    hostile("slice", "V.indices(10)", "V=slice(0,9,@@)"),
    hostile("range", "[*V]", "V=range(0,6,@@)"),
    hostile("operator", "V(dict(a=1,b=2))", "V=operator.itemgetter('@@')", one="a", other="b"),
    hostile("methodcaller", "V('x')", "V=operator.methodcaller('ljust',@@)", one="3", other="5"),
    hostile(
        "bound method", "V()", "class K:\n    def __init__(self,n): self.n=n\n    def f(self): return self.n\nV=K(@@).f"
    ),
    hostile("builtin method", "V(1)", "V=[@@,1].count", other="5"),
    hostile("exception", "V.args", "V=ValueError(@@)"),
    hostile("exception note", "V.__notes__", "V=ValueError(1)\nV.__notes__=['@@']"),
    hostile("complex", "V", "V=@@", one="1j", other="-1j"),
    hostile("bytes bytearray", "type(V).__name__", "V=@@(b'a')", one="bytes", other="bytearray"),
    hostile("array module", "V", "import array\nV=array.array('@@',[1,2])", one="i", other="l"),
    hostile("PIL", "V.getpixel((0,0))", "import PIL.Image\nV=PIL.Image.new('RGB',(2,2),(@@,0,0))"),
    hostile("PIL info", "V.info", "import PIL.Image\nV=PIL.Image.new('RGB',(2,2))\nV.info['a']=@@"),
    hostile(
        "proxy of a function",
        "V(2)",
        "import cfg\nV = cfg.P(lambda i: i + 1, @@)",
        files={
            "cfg.py": "import types\nclass P:\n    __class__ = property(lambda self: types.FunctionType)\n"
            "    def __init__(self, f, k): self.f, self.k = f, k\n    def __call__(self, i): return self.f(i) * self.k\n"
            "    def __getattr__(self, name): return getattr(vars(self)['f'], name)\n    def __reduce__(self): return P, (self.f, self.k)"
        },
    ),
    hostile(
        "own singledispatch",
        "cfg.f(1)",
        "import cfg\n@cfg.f.register\ndef _(x: int): return @@",
        files={"cfg.py": "import functools\n@functools.singledispatch\ndef f(x): return 0"},
    ),
    hostile("slots", "V.a", "class K:\n    __slots__=('a',)\nV=K(); V.a=@@"),
    hostile(
        "class in own nested",
        "cfg.K.L.s",
        "import cfg\ncfg.K.L.s=@@",
        files={"cfg.py": "class K:\n    class L:\n        s=0"},
    ),
    hostile(
        "own dataclass field default",
        "cfg.K().a",
        "import cfg\ncfg.K.__init__.__defaults__=(@@,)",
        files={"cfg.py": "import dataclasses\n@dataclasses.dataclass\nclass K:\n    a: int = 0"},
    ),
    hostile(
        "own enum member",
        "cfg.E.A.x",
        "import cfg\ncfg.E.A.x=@@",
        files={"cfg.py": "import enum\nclass E(enum.Enum):\n    A=1"},
    ),
    hostile(
        "own instance deep",
        "cfg.c.b.s",
        "import cfg\ncfg.c.b.s=@@",
        files={"cfg.py": "class B:\n    s=0\nclass C:\n    def __init__(self): self.b=B()\nc=C()"},
    ),
    hostile("own dict deep", "cfg.C['a']['b']", "import cfg\ncfg.C['a']['b']=@@", files={"cfg.py": "C={'a':{'b':0}}"}),
    hostile(
        "own staticmethod",
        "cfg.K.f()",
        "import cfg\ncfg.K.f=staticmethod(lambda: @@)",
        files={"cfg.py": "class K:\n    @staticmethod\n    def f(): return 0"},
    ),
    hostile(
        "own classmethod defaults",
        "cfg.K.f()",
        "import cfg\ncfg.K.__dict__['f'].__func__.__defaults__=(@@,)",
        files={"cfg.py": "class K:\n    @classmethod\n    def f(cls,a=0): return a"},
    ),
    hostile(
        "own metaclass",
        "cfg.K.s",
        "import cfg\ncfg.M.s=property(lambda c: @@)",
        files={"cfg.py": "class M(type):\n    s=0\nclass K(metaclass=M): pass"},
    ),
    hostile(
        "own bases",
        "cfg.K().f()",
        "import cfg\ncfg.K.__bases__=(cfg.@@,)",
        one="A",
        other="B",
        files={"cfg.py": "class A:\n    def f(self): return 1\nclass B:\n    def f(self): return 2\nclass K(A): pass"},
        loads="cfg.K has another value",
    ),
    hostile(
        "own class kept elsewhere",
        "pkg.b.f()",
        "import pkg.b, pkg.a\nclass N(pkg.a.K): s=@@\npkg.a.K=N",
        files={"pkg/__init__.py": "", "pkg/a.py": "class K: s=0", "pkg/b.py": "from . import a\ndef f(): return a.K.s"},
    ),
    hostile(
        "own lru",
        "cfg.f()",
        "import cfg\ncfg.S=@@",
        files={"cfg.py": "import functools\nS=len('abc')\n@functools.lru_cache\ndef f(): return S"},
    ),
    hostile("own lambda", "cfg.f()", "import cfg\ncfg.S=@@", files={"cfg.py": "S=len('abc')\nf=lambda: S"}),
    hostile("own lambda replaced", "cfg.f()", "import cfg\ncfg.f=lambda: @@", files={"cfg.py": "f=lambda: 0"}),
    hostile(
        "own closure list",
        "cfg.f()",
        "import cfg\ncfg.f.__closure__[0].cell_contents.append(@@)",
        files={
            "cfg.py": "def mk():\n    c=[]\n    def f(): return c[-1:]\n    f.__qualname__='f'\n    return f\nf=mk()"
        },
    ),
    hostile(
        "own getattr module",
        "cfg.X",
        "import cfg\ncfg._s=@@",
        files={"cfg.py": "_s=len('')\ndef __getattr__(n):\n    if n=='X': return _s\n    raise AttributeError(n)"},
    ),
    hostile(
        "own np array", "cfg.A[0]", "import cfg\ncfg.A[0]=@@", files={"cfg.py": "import numpy as np\nA=np.zeros(3)"}
    ),
    hostile(
        "own tensor alias",
        "cfg.f()",
        "import cfg\ncfg.A[0]=@@",
        files={"cfg.py": "import torch\nA=torch.zeros(3)\nB=A\ndef f(): return B[0], A[0]"},
    ),
    hostile(
        "own mutable default alias",
        "cfg.f()",
        "import cfg\ncfg.C['s']=@@",
        files={"cfg.py": "C={'s':0}\ndef f(c=C): return c['s'], C['s']"},
    ),
    hostile(
        "own class attr alias",
        "cfg.K.c['s'], cfg.C['s']",
        "import cfg\ncfg.C['s']=@@",
        files={"cfg.py": "C={'s':0}\nclass K:\n    c=C"},
    ),
    hostile("own generator", "next(cfg.G())", "import cfg\ncfg.S=@@", files={"cfg.py": "S=int('4')\ndef G(): yield S"}),
    hostile(
        "own async",
        "cfg.f()",
        "import cfg\ncfg.g.__defaults__=(@@,)",
        files={"cfg.py": "import asyncio\nasync def g(a=0): return a\ndef f(): return asyncio.run(g())"},
    ),
    hostile(
        "own property setter",
        "cfg.K().p",
        "import cfg\ncfg.K.p=cfg.K.p.getter(lambda s: @@)",
        files={"cfg.py": "class K:\n    p=property(lambda s: 0)"},
    ),
    hostile(
        "own abc",
        "cfg.K().f()",
        "import cfg\ncfg.K.s=@@",
        files={
            "cfg.py": "import abc\nclass A(abc.ABC):\n    @abc.abstractmethod\n    def f(self): ...\nclass K(A):\n    s=0\n    def f(self): return self.s"
        },
    ),
    hostile(
        "own protocol generic",
        "cfg.K().f()",
        "import cfg\ncfg.K.s=@@",
        files={
            "cfg.py": "import typing\nT=typing.TypeVar('T')\nclass K(typing.Generic[T]):\n    s=0\n    def f(self): return self.s"
        },
    ),
    hostile(
        "own pydantic",
        "cfg.C.size",
        "import cfg\ncfg.C.size=@@",
        files={"cfg.py": "import pydantic\nclass M(pydantic.BaseModel):\n    size: int = 0\nC=M()"},
    ),
    hostile(
        "own nn module",
        "cfg.M(torch.ones(1,1)).item()",
        "import cfg\nwith torch.no_grad(): cfg.M.weight[:]=@@; cfg.M.bias[:]=0",
        files={"cfg.py": "import torch\nM=torch.nn.Linear(1,1)"},
    ),
    hostile(
        "own mangled",
        "cfg.K().f()",
        "import cfg\ncfg.K._K__s=@@",
        files={"cfg.py": "class K:\n    __s=0\n    def __g(self): return self.__s\n    def f(self): return self.__g()"},
    ),
    hostile(
        "own mangled method",
        "cfg.K().f()",
        "import cfg\ncfg.K._K__g=lambda s: @@",
        files={"cfg.py": "class K:\n    def __g(self): return 0\n    def f(self): return self.__g()"},
    ),
    hostile(
        "own sys.modules obj",
        "cfg.s",
        "import cfg\ncfg.s=@@",
        files={"cfg.py": "import sys\nclass C:\n    s=0\nsys.modules[__name__]=C()"},
    ),
    hostile(
        "own dict subclass",
        "cfg.C['s']",
        "import cfg\ncfg.C['s']=@@",
        files={
            "cfg.py": "class E(dict):\n    def __getattr__(self, n):\n        if n in self: return self[n]\n        raise AttributeError(n)\nC=E(s=0)"
        },
    ),
    hostile(
        "own attr with slots",
        "cfg.C.s",
        "import cfg\ncfg.C.s=@@",
        files={"cfg.py": "class E:\n    __slots__=('s',)\nC=E()\nC.s=0"},
    ),
    hostile(
        "own frozen",
        "cfg.C.s",
        "import cfg\nobject.__setattr__(cfg.C,'s',@@)",
        files={"cfg.py": "import dataclasses\n@dataclasses.dataclass(frozen=True)\nclass E:\n    s: int=0\nC=E()"},
    ),
    hostile(
        "own protocol with a value",
        "cfg.P.s, cfg.K().f(), cfg.W.s",
        "import cfg\ncfg.P.s = @@",
        files={
            "cfg.py": "import typing\nclass P(typing.Protocol):\n    s: int = 0\n    def f(self): ...\n"
            "class M(type):\n    def __instancecheck__(cls, o): raise TypeError(o)\nclass W(metaclass=M):\n    s = 1\n"
            "class T(typing.TypedDict):\n    a: int\nclass K(P):\n    def f(self): return self.s\n"
        },
    ),
]
HOSTILE += [
    Pair(f"bare: {put}", part, data(read, f"import cfg\n{put}"), files={"cfg.py": BARE}, loads="")
    for part, read, put in [
        ("cfg.K.s", "cfg.K().f()", "cfg.K.s = @@"),
        ("cfg.K.f", "cfg.K().f()", "cfg.K.f = lambda self: @@"),
        ("cfg.V.s", "cfg.V.s", "cfg.V.s = @@"),
        ("cfg.f(a)", "cfg.f()", "cfg.f.__defaults__ = (@@,)"),
        ("cfg.f", "cfg.f()", "cfg.f.__code__ = (lambda a: @@).__code__"),
        ("cfg.c", "cfg.c()", "cfg.c = functools.lru_cache(functools.partial(cfg.f, @@))"),
        ("cfg.S.d", "cfg.S.d.a", "cfg.S.d.a = @@"),
        ("__main__.K", "K().f()", 'K = cfg.bare(\'K = type("K", (), {"f": lambda self: @@})\')'),
        ("__main__.c", "c()", "c = functools.lru_cache(functools.partial(int, '@@'))"),
    ]
]
HELD = """import collections, functools
@functools.lru_cache
def c(x): return x
def wrapping(f):
    @functools.wraps(f)
    def h(x): return f(x)
    return h
@wrapping
def d(x): return x
L = [1]
M = L
F = collections.defaultdict(int, a=1)
O = collections.OrderedDict(a=1)
class E(dict): pass
E = E(a=1)
class Z(set): pass
Z = Z([1])
class K:
    l = L
    @staticmethod
    def s(x): return x
    @functools.lru_cache
    def c(self): return 1
    @property
    def p(self): return 1
    @functools.cached_property
    def v(self): return 1
V = K()
"""
HELD_FILES = {"cfg.py": HELD, "b_set.py": "from cfg import L"}
HOSTILE += [
    Pair(f"{read}, by {put}", part, data(read, f"import b_set, cfg\n{put}"), *texts, files=HELD_FILES)
    for part, read, put, *texts in [
        ("cfg.c.k", "cfg.c.k", "cfg.c.k = @@"),
        ("cfg.c.__wrapped__", "cfg.c.__wrapped__.k", "cfg.c.__wrapped__.k = @@"),
        ("cfg.K.c.k", "cfg.K.c.k", "cfg.K.c.k = @@"),
        ("cfg.d.k", "cfg.d.k", "cfg.d.k = @@"),
        ("cfg.d.__wrapped__", "cfg.d.__wrapped__.k", "cfg.d.__wrapped__.k = @@"),
        ("cfg.d.__wrapped__", "cfg.d.__wrapped__(3)", "cfg.d.__wrapped__ = lambda x: @@"),
        ("cfg.d.__wrapped__", "cfg.d.__wrapped__.__defaults__", "cfg.d.__wrapped__.__defaults__ = (@@,)"),
        ("cfg.K.s.__wrapped__", "cfg.K.s.k", "cfg.K.s.k = @@"),
        ("cfg.K.s.k", "vars(cfg.K)['s'].k", "vars(cfg.K)['s'].k = @@"),
        ("cfg.K.p.fget", "cfg.K.p.fget.k", "cfg.K.p.fget.k = @@"),
        ("cfg.F", "cfg.F['x'], cfg.F['a']", "cfg.F.default_factory = @@", "str", "list"),
        ("cfg.V.v", "cfg.V.v", "cfg.V.v = @@"),
        ("cfg.E", "cfg.E.k, cfg.E", "cfg.E.k = @@"),
        ("cfg.Z", "cfg.Z.k, cfg.Z", "cfg.Z.k = @@"),
        ("cfg.O", "[*cfg.O]", "cfg.O['b'] = 1\ncfg.O.move_to_end(@@)", "'a'", "'b'"),
        ("cfg.M(is)", "cfg.M is cfg.L", "if @@ == 2: cfg.M = [1]"),
        ("cfg.K.l(is)", "cfg.K.l is cfg.L", "if @@ == 2: cfg.K.l = [1]"),
        ("b_set.L", "b_set.L is cfg.L, b_set.L, cfg.L", "if @@ == 2: b_set.L = [7]"),
    ]
]
