"""Pages are written in short sentences, and the how-to pages have one shape: see "Writing" in CONTRIBUTING.md."""

from __future__ import annotations

import re
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
