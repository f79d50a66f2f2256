"""Pairs of scripts of which one has a mutable object in two places, and the other has two equal ones."""

from __future__ import annotations

from tests.remote.shipping.identity_pairs import Pair, data

K = "class K:\n    pass\n"
ALIASED = [
    Pair(f"one: {made}, {change}", part, data(f"{read[0]} is {read[1]}", f"{made}\nif @@ == 2: {change}"), loads="")
    for part, read, made, change in [
        ("__main__.V['b']", ("V['a']", "V['b']"), "V = {'a': [1], 'b': [1]}", "V['b'] = V['a']"),
        ("__main__.V['b']", ("V['a']", "V['b']"), "V = {'a': np.ones(2), 'b': np.ones(2)}", "V['b'] = V['a']"),
        ("__main__.V", ("V[1]", "V[2]"), "V = {1: {}, 2: {}}", "V[2] = V[1]"),
        ("__main__.V", ("V[1]", "V[2]"), "V = {n: [0] for n in range(99)}", "V[2] = V[1]"),
        ("__main__.V", ("V[0]", "V[1]"), "V = [[1], [1]]", "V[1] = V[0]"),
        ("__main__.V", ("V[0]", "V[1]"), "V = [bytearray(b'a'), bytearray(b'a')]", "V[1] = V[0]"),
        ("__main__.V", ("V[0][0]", "V[1][0]"), "V = [[[1]], [[1]]]", "V[1][0] = V[0][0]"),
        ("__main__.V", ("V[0][0]", "V[1]"), "V = [[[1]], [1]]", "V[1] = V[0][0]"),
        ("__main__.V", ("V[0]", "V[1]"), "V = [[1] for _ in range(40)]", "V[1] = V[0]"),
        ("__main__.V", ("V[0]", "V[1]"), "V = [np.ones(2) for _ in range(40)]", "V[1] = V[0]"),
        ("__main__.V", ("V[0][1]", "V[1][1]"), "V = [('a', [1]) for _ in range(40)]", "V[1] = 'a', V[0][1]"),
        ("__main__.V", ("V[0]", "V[1]"), f"{K}V = [K() for _ in range(40)]", "V[1] = V[0]"),
        ("__main__.V.b", ("V.a", "V.b"), f"{K}V = K()\nV.a, V.b = {{1}}, {{1}}", "V.b = V.a"),
        ("__main__.V.b", ("V.a", "V.b"), "V = types.SimpleNamespace(a=[], b=[])", "V.b = V.a"),
        ("__main__.K.b", ("K.a", "K.b"), "class K:\n    a, b = [], []", "K.b = K.a"),
        ("__main__.f(b)", ("f()[0]", "f()[1]"), "def f(a=[], b=[]): return a, b", "f.__defaults__ = ([],) * 2"),
        ("__main__.V", ("V['a']", "V['b']"), "V = collections.OrderedDict(a=[1], b=[1])", "V['b'] = V['a']"),
        ("__main__.V", ("V[0]", "V[1]"), "V = collections.deque([[1], [1]])", "V[1] = V[0]"),
        ("__main__.V", ("V[0]", "V[1]"), "V = [random.Random(1), random.Random(1)]", "V[1] = V[0]"),
        ("__main__.V", ("V[0]", "V[1]"), "V = [np.random.default_rng(n) for n in (1, 1)]", "V[1] = V[0]"),
        ("__main__.V", ("V[0]", "V[1]"), "V = [torch.Generator(), torch.Generator()]", "V[1] = V[0]"),
        ("__main__.V", ("V.x[0]", "V.x[1]"), "V = argparse.Namespace(x=[[1], [1]])", "V.x[1] = V.x[0]"),
    ]
]
ALIASED += [
    Pair(
        f"one in a module: {made}",
        "cfg.C",
        data(f"cfg.C{one} is cfg.C{other}", f"import cfg\nif @@ == 2: cfg.C{other} = cfg.C{one}"),
        files={"cfg.py": made},
    )
    for made, one, other in [
        ("C = {'a': [1], 'b': [1]}", "['a']", "['b']"),
        ("C = [[1], [1]]", "[0]", "[1]"),
        ("C = dict(a=[1], b=[1])", "['a']", "['b']"),
        (f"{K}C = K()\nC.a, C.b = [1], [1]", ".a", ".b"),
    ]
]
