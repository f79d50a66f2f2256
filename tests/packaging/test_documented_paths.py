"""The documents name files, modules and their contents as they are in the tree."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: Where a path in a document may begin: the package, and its rooms, are left out of paths.
HOMES = (ROOT, ROOT / "torch_dpflow")
DOCUMENTS = sorted(
    path
    for pattern in ("[!C]*.md", "CONTRIBUTING.md", "docs/**/*.md", "benchmarks/**/*.md", "examples/**/*.md")
    for path in ROOT.glob(pattern)
)
#: What commands make in a clone: there or not.
MADE = {line.strip("/") for line in (ROOT / ".gitignore").read_text().splitlines() if line.endswith("/")}
_CODE = re.compile(r"`([^`\n]+)`")
_BLOCK = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_PATH = re.compile(r"[\w.*-]+(/[\w.*-]+)+/?")
_DOTTED = re.compile(r"[a-z_]\w*(\.(?!(?:py|md|json)\b)[A-Za-z_]\w*)+(\(\))?")


def _is_there(path: str) -> bool:
    return any(next(home.glob(path + end), None) for home in HOMES for end in ("", ".py"))


def _is_ours(path: str) -> bool:
    first = path.split("/")[0]
    return "NAME" not in path and first not in MADE and any((home / first).is_dir() for home in HOMES)


def _defines(dotted: str) -> bool:
    """Whether a dotted name is a module, or the module that it begins with mentions what comes after."""
    names = dotted.removesuffix("()").split(".")
    for home in HOMES:
        for count in range(len(names), 0, -1):
            module = home.joinpath(*names[:count])
            for file in (module.with_suffix(".py"), module / "__init__.py"):
                if file.is_file():
                    text = file.read_text()
                    if all(re.search(rf"\b{name}\b", text) for name in names[count : count + 1]):
                        return True
    return False


def _is_module_of_ours(dotted: str) -> bool:
    first = dotted.split(".")[0]
    return any((home / first).is_dir() or (home / f"{first}.py").is_file() for home in HOMES)


def _is_wrong(code: str) -> bool:
    if _PATH.fullmatch(code):
        return _is_ours(code) and not _is_there(code.rstrip("/"))
    return bool(_DOTTED.fullmatch(code)) and _is_module_of_ours(code) and not _defines(code)


def wrong_names(text: str) -> list[str]:
    """What a document names in backticks that looks like a path or module of ours, and is not there."""
    return [code for code in _CODE.findall(_BLOCK.sub("", text)) if _is_wrong(code)]


def test_every_path_in_a_document_is_there() -> None:
    assert [(str(path), name) for path in DOCUMENTS for name in wrong_names(path.read_text())] == []


@pytest.mark.parametrize("name", ["loader/nothing", "workers/engin", "errors.NoSuchError", "caches/no*.py"])
def test_a_path_that_is_not_there_is_found(name: str) -> None:
    assert wrong_names(f"See `{name}` and `workers/shard`, `errors.ErrorKind`, `a/path/of/others`.") == [name]
