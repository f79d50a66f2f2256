"""Print figures of the package's size and structure: `python tools/code_figures.py [CLONE]`.

Lines by kind, sizes of files and functions, modules that one other module alone imports, import cycles (type-only
imports count), words of the private language that are still in use, and long sentences of the documentation.
"""

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import quantiles

#: Words that the code once used for what the field has a standard noun for.
WORDS = re.compile(
    r"(?:^|[.:] |\"\"\")Those\b|\b(whoever|nobody|somebody|knocks?|strangers?|keepers?|parcels?|doors?|lanes?|"
    r"adapters?|is told|are told|has told|patience|beats?|owing)\b|MOST_(?!common)|LEAST_",
    re.IGNORECASE,
)
LONG_SENTENCE = 30
Node = ast.FunctionDef | ast.AsyncFunctionDef


def modules(root: Path) -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    found = {}
    for path in sorted((root / "torch_dpflow").rglob("*.py")):
        found[".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")] = path
    return found


def imports(nodes: Iterable[ast.AST], known: dict[str, Path]) -> set[str]:
    """The package's modules that a module names in import statements, wherever they stand."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.add(full if full in known else node.module)
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
    return found & known.keys()


def import_graph(known: dict[str, Path]) -> dict[str, set[str]]:
    """By module, the others that it imports."""
    return {name: imports(ast.walk(ast.parse(path.read_text())), known) - {name} for name, path in known.items()}


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Strongly connected components of more than one module (Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in graph[name]:
            if other not in index:
                visit(other)
            if other in stack:
                low[name] = min(low[name], low[other])
        if low[name] == index[name]:
            part = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(part) > 1:
                found.append(part)

    for name in graph:
        if name not in index:
            visit(name)
    return found


def kinds(text: str, tree: ast.AST) -> Counter[str]:
    """Lines of imports, docstrings, comments, blank lines and code."""
    kind = ["code"] * (len(text.splitlines()) + 1)
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            kind[number] = "blank"
        elif line.strip().startswith("#"):
            kind[number] = "comments"
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            last = node.end_lineno or node.lineno
            kind[node.lineno : last + 1] = ["imports"] * (last + 1 - node.lineno)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            last = node.end_lineno or node.lineno
            kind[node.lineno : last + 1] = ["docstrings"] * (last + 1 - node.lineno)
    return Counter(kind[1:])


def long_sentences(text: str) -> Iterator[str]:
    """Sentences of a page's paragraphs above 30 words; code, tables and headings are left out."""
    text = re.sub(r"```.*?```|\$\$.*?\$\$", "", text, flags=re.DOTALL)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", text):
        if paragraph.lstrip().startswith(("|", "#", ">", "<", "    ")):
            continue
        for sentence in re.split(r"(?<=[.!?])\s+", " ".join(paragraph.split())):
            if len(sentence.split()) > LONG_SENTENCE:
                yield sentence


def spread(sizes: list[int]) -> str:
    """Median, ninth decile and maximum."""
    parts = quantiles(sizes, n=10)
    return f"{parts[4]:.0f} / {parts[8]:.0f} / {max(sizes)}"


def main() -> None:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else ".").resolve()
    known = modules(root)
    lines: Counter[str] = Counter()
    files, functions = [], []
    words: Counter[str] = Counter()
    graph = import_graph(known)
    for path in known.values():
        text = path.read_text()
        tree = ast.parse(text)
        lines += kinds(text, tree)
        files.append(len(text.splitlines()))
        functions += [
            (node.end_lineno or node.lineno) + 1 - node.lineno for node in ast.walk(tree) if isinstance(node, Node)
        ]
        words.update(found[0].lower() for found in WORDS.finditer(text))
    users = Counter(other for others in graph.values() for other in others)
    alone = sum(1 for name in known if users[name] == 1 and not known[name].name.startswith("__"))
    pages = [*root.glob("*.md"), *(root / "docs").rglob("*.md"), *(root / "benchmarks").glob("*.md")]
    sentences = sum(len([*long_sentences(page.read_text())]) for page in pages if page.name != "CHANGELOG.md")
    print("| figure | value |\n| --- | --- |")
    for what, value in (
        ("lines", sum(lines.values())),
        *((f"lines of {kind}", count) for kind, count in lines.most_common()),
        ("modules", len(known)),
        ("lines of a file, p50 / p90 / max", spread(files)),
        ("lines of a function, p50 / p90 / max", spread(functions)),
        ("modules that one other imports", alone),
        ("import cycles, type-only imports included", len(cycles(graph))),
        ("bytes of ARCHITECTURE.md", (root / "ARCHITECTURE.md").stat().st_size),
        ("lines of .importlinter", len((root / ".importlinter").read_text().splitlines())),
        ("words of the private language", sum(words.values())),
        (f"sentences above {LONG_SENTENCE} words", sentences),
    ):
        print(f"| {what} | {value:,} |" if isinstance(value, int) else f"| {what} | {value} |")
    print("\n".join(f"{word}: {count}" for word, count in words.most_common()), file=sys.stderr)


if __name__ == "__main__":
    main()
