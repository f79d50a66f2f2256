"""Pages, docstrings and comments are written as "Writing" in CONTRIBUTING.md says, and name what exists."""

from __future__ import annotations

import ast
import builtins
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pages import DOCS, HOWTO, ROOT, named

MAX_WORDS = 30
PAGES = sorted(
    [
        *(ROOT / name for name in ("README.md", "SECURITY.md", "CONTRIBUTING.md")),
        *DOCS.rglob("*.md"),
        *(ROOT / "benchmarks").glob("*.md"),
    ]
)
SECTIONS = (
    "You need",
    "Example",
    "How it works",
    "Options",
    "Check that it works",
    "When it fails",
    "Limits",
)


def sentences(text: str) -> Iterator[str]:
    """The sentences of a page's prose: no code blocks, tables and headings; code and links count as one word each."""
    text = re.sub(r"^ *```.*?^ *```$", "\n", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^ *(\||#).*$", "\n", text, flags=re.MULTILINE)
    text = re.sub(r"!\[[^]]*\]\([^)]*\)", "", text)
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"(\{[\w:]+\})?`[^`]*`", "code", text)
    text = re.sub(r"^ *([-*]|\d+\.) ", "\n", text, flags=re.MULTILINE)
    for paragraph in re.split(r"\n\s*\n", text):
        yield from re.split(r"(?<=[.!?])[\")*]*(?<!eq\.)(?<!al\.)\s+", " ".join(paragraph.split()))


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_no_sentence_of_a_page_is_long(page: Path) -> None:
    found = [one for one in sentences(page.read_text("utf-8")) if len(re.findall(r"\w\S*", one)) > MAX_WORDS]
    assert not found, f"more than {MAX_WORDS} words: divide them, or make a list or table of them"


def test_a_long_sentence_is_found() -> None:
    long = "word " * MAX_WORDS
    text = f"# {long}x\n\n{long.strip()}. {long}more.\n\n| {long}x |\n\n```\n{long}x\n```\n\n[a](b) {long.strip()}."
    assert [one.count(" ") for one in sentences(text) if len(one.split()) > MAX_WORDS] == [
        MAX_WORDS,
        MAX_WORDS,
    ]


@pytest.mark.parametrize("page", sorted(HOWTO.glob("*.md")), ids=named)
def test_a_how_to_page_has_the_shape_of_all(page: Path) -> None:
    headings = re.findall(r"^## (.+)$", page.read_text("utf-8"), re.MULTILINE)
    assert [one for one in SECTIONS if one not in headings] == []
    shaped = [one for one in headings if one in SECTIONS]
    assert shaped[0] == "You need"
    assert shaped[1] == "Example"


#: Words that readers of pages stumble over: unidiomatic, archaic, or with a plainer word.
AVOIDED_IN_PAGES = re.compile(
    r"\b(another number of|(one|a) loading(?! flow)|beside|anew|whoever|nobody|of our own|times? of change|of a cloud|"
    r"where (it|they) lies?|as ever|at any size|is told|for ever(?! and)|the like|the rest|in any case|lies|"
    r"(by|for) themselves|less torch's|of the .{1,20}'s own limit|once in many)\b|\bfrom [0-9][\w., ]{0,20} on\b|"
    r"\bsome (?=[0-9])|\b((once|times) an epoch|remove the reason|at hand|for people|likewise)\b|"
    r"\[[^]]*\]\([^)]*\) has (?!a |one )",
    re.IGNORECASE,
)


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_a_page_has_no_word_that_readers_stumble_over(page: Path) -> None:
    assert [found[0] for found in AVOIDED_IN_PAGES.finditer(page.read_text("utf-8"))] == []


def test_a_word_that_readers_of_pages_stumble_over_is_found() -> None:
    text = (
        "Resume with another number of ranks, anew: one loading beside the other, from 10 samples on, and the rest by "
        "themselves. [Errors](a.md) has the errors, in any case: some 10 of them. Once an epoch, remove the reason."
    )
    found = ["another number of", "anew", "one loading", "beside", "from 10 samples on", "the rest", "by themselves"]
    found += ["[Errors](a.md) has ", "in any case", "some ", "Once an epoch", "remove the reason"]
    assert [one[0] for one in AVOIDED_IN_PAGES.finditer(text)] == found


@pytest.mark.parametrize("page", sorted(HOWTO.glob("*.md")), ids=named)
def test_a_table_of_errors_names_the_error_the_cause_and_what_to_do(page: Path) -> None:
    text = page.read_text("utf-8")
    section = re.search(r"^## When it fails\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert section is not None
    tables = re.findall(r"(?:^\|.*\n)+", section[1], re.MULTILINE)
    columns = [[cell.strip() for cell in table.splitlines()[0].strip("|").split("|")] for table in tables]
    assert all(len(one) == 3 and one[2] == "what to do" for one in columns[:1])


PACKAGE = ROOT / "torch_dpflow"
#: Words that the project does not use for programs, or that readers stumble over.
AVOIDED = re.compile(
    r"\b(whoever|nobody|somebody|(is|are) told|has come|knocks?|strangers?|parcels?|anew|patience)\b"
    r"|\b(in any case|says so|another number of|for ever|with as many (ranks|workers)(?! as))\b|\bsome (?=[0-9])"
    r"|\bas ever\b(?! \w+ed\b)|\b(MOST|LEAST)_[A-Z]"
    r"|\bof (its|their|his|your|our) own(?=\s*[.,;:)]|$)|\bfor people\b|\b(once|times) an epoch\b|\blikewise\b"
    r"|\b[Aa]s of `|\bfrom (?!now|then|here)[\w*`]{1,20} on(?=[.,;])"
)
#: Names of other libraries, of variables of the environment, and of examples.
ELSEWHERE = re.compile(
    r"DPFLOW_\w+|a/0001.*|mydata.*|ps|R|x\.conj|save_to_disk|sched_setattr|authkey|key_filename|AsyncTask|Batcher|"
    r"Feature|Function|Loader|PinMemory|Prefetcher|RandomResizedCrop|(torch|functools|pickletools)\..*"
)


#: Tokens with the text of strings. From Python 3.12 on, an f-string has tokens for its parts.
STRINGS = (tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING))


def written(path: Path) -> tuple[list[tuple[int, str]], set[str]]:
    """Return the docstrings and comments of a module with their lines, and the names that its code has."""
    source, texts, names = path.read_text("utf-8"), [], {*path.with_suffix("").parts, *path.parts}
    for node in ast.walk(ast.parse(source)):
        has_docstring = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if has_docstring and (text := ast.get_docstring(node, clean=False)) is not None:
            texts.append((node.body[0].lineno, text))
    docstrings = {line for line, _ in texts}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            texts.append((token.start[0], token.string))
        elif token.type == tokenize.NAME:
            names.add(token.string)
        elif token.type in STRINGS and token.start[0] not in docstrings:
            names.update(re.findall(r"\w+", token.string))
    return texts, names


def test_docstrings_and_comments_name_what_exists_in_plain_words() -> None:
    modules = {path: written(path) for path in PACKAGE.rglob("*.py")}
    known = {*dir(builtins)}.union(*(names for _, names in modules.values()))
    others = [path for name in ("tests", "docs", "tools", "benchmarks") for path in (ROOT / name).rglob("*")]
    known.update(part for path in others for part in (*path.parts, path.stem))
    gone, avoided = [], []
    for path, (texts, _) in modules.items():
        place = str(path.relative_to(ROOT))
        for line, text in texts:
            names = re.findall(r"(?<!`)`([A-Za-z_][\w./]*)(?:\(\))?`(?!`)", text)
            unknown = [name for name in names if not {*filter(None, re.split(r"[./]", name))} <= known]
            gone += [(place, line, name) for name in unknown if not ELSEWHERE.fullmatch(name)]
            avoided += [(place, line, found[0]) for found in AVOIDED.finditer(text)]
    assert not gone
    assert not avoided


def test_a_name_that_is_gone_and_a_word_that_is_avoided_are_found() -> None:
    text = "Whoever calls `nothing.like_this` is told anew, some 10 times in any case."
    text += " As of `X`: once an epoch, likewise from 9 on, in a thread of its own."
    found = ["whoever", "is told", "anew", "some ", "in any case"]
    found += ["as of `", "once an epoch", "likewise", "from 9 on", "of its own"]
    assert [one[0] for one in AVOIDED.finditer(text.lower())] == found


def test_names_in_texts_of_code_exist(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text('"""Not `Docstring`."""\nkind = f"Example of {kind} and " "Another"\n')
    texts, names = written(module)
    assert texts == [(1, "Not `Docstring`.")]
    assert {"Example", "Another", "kind"} <= names
    assert "Docstring" not in names
