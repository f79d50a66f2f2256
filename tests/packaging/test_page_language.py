"""Pages are written as "Writing" in CONTRIBUTING.md says."""

from __future__ import annotations

import re
from collections.abc import Iterator

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


def test_no_sentence_of_a_page_is_long() -> None:
    found = [
        (named(page), one)
        for page in PAGES
        for one in sentences(page.read_text("utf-8"))
        if len(re.findall(r"\w\S*", one)) > MAX_WORDS
    ]
    assert not found, f"more than {MAX_WORDS} words: divide them, or make a list or table of them"


def test_a_long_sentence_is_found() -> None:
    long = "word " * MAX_WORDS
    text = f"# {long}x\n\n{long.strip()}. {long}more.\n\n| {long}x |\n\n```\n{long}x\n```\n\n[a](b) {long.strip()}."
    assert [one.count(" ") for one in sentences(text) if len(one.split()) > MAX_WORDS] == [
        MAX_WORDS,
        MAX_WORDS,
    ]


def broken_rows(text: str) -> list[str]:
    """The rows of a page's tables that go on in another line, where Markdown begins another row."""
    text = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"^ *\|.*[^|\s] *$", text, re.MULTILINE)


def test_every_row_of_a_table_is_one_line() -> None:
    assert [(named(page), row) for page in PAGES for row in broken_rows(page.read_text("utf-8"))] == []


def test_a_broken_row_is_found() -> None:
    text = "| a | b |\n| --- | --- |\n| 1 | one \ntwo |\n| 3 | 4 |\n\n```\n| code\n```\n"
    assert broken_rows(text) == ["| 1 | one "]


def test_a_how_to_page_has_the_shape_of_all() -> None:
    for page in HOWTO.glob("*.md"):
        headings = re.findall(r"^## (.+)$", page.read_text("utf-8"), re.MULTILINE)
        assert [one for one in SECTIONS if one not in headings] == [], page
        assert [one for one in headings if one in SECTIONS][:2] == ["You need", "Example"], page


#: Words that readers of pages stumble over: unidiomatic, archaic, or with a plainer word.
AVOIDED_IN_PAGES = re.compile(
    r"\b(another number of|(one|a) loading(?! flow)|beside|anew|whoever|nobody|of our own|times? of change|of a cloud|"
    r"where (it|they) lies?|as ever|at any size|is told|for ever(?! and)|the like|the rest|in any case|lies|"
    r"(by|for) themselves|less torch's|of the .{1,20}'s own limit|once in many)\b|\bfrom [0-9][\w., ]{0,20} on\b|"
    r"\bsome (?=[0-9])|\b((once|times) an epoch|remove the reason|at hand|for people|likewise)\b|"
    r"\b(correct|install|keeps?|caches?) what\b|\b(the training's|(an)?other \w+ than)\b|"
    r"\b(of|in|with) another (type|kind|class|format|shape|length|size|order|`seeding`)|"
    r"\[[^]]*\]\([^)]*\) has (?!a |one )",
    re.IGNORECASE,
)


def test_a_page_has_no_word_that_readers_stumble_over() -> None:
    assert [
        (named(page), found[0]) for page in PAGES for found in AVOIDED_IN_PAGES.finditer(page.read_text("utf-8"))
    ] == []


def test_a_word_that_readers_of_pages_stumble_over_is_found() -> None:
    text = (
        "Resume with another number of ranks, anew: one loading beside the other, from 10 samples on, and the rest by "
        "themselves. [Errors](a.md) has the errors, in any case: some 10 of them. Once an epoch, remove the reason. "
        "Correct what the message names. Rows of another type need other settings than these; the training's end."
    )
    found = ["another number of", "anew", "one loading", "beside", "from 10 samples on", "the rest", "by themselves"]
    found += ["[Errors](a.md) has ", "in any case", "some ", "Once an epoch", "remove the reason", "Correct what"]
    found += ["of another type", "other settings than", "the training's"]
    assert [one[0] for one in AVOIDED_IN_PAGES.finditer(text)] == found


def test_a_table_of_errors_names_the_error_the_cause_and_what_to_do() -> None:
    for page in HOWTO.glob("*.md"):
        text = page.read_text("utf-8")
        section = re.search(r"^## When it fails\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
        assert section is not None, page
        tables = re.findall(r"(?:^\|.*\n)+", section[1], re.MULTILINE)
        columns = [[cell.strip() for cell in table.splitlines()[0].strip("|").split("|")] for table in tables]
        assert all(len(one) == 3 and one[2] == "what to do" for one in columns[:1]), page
