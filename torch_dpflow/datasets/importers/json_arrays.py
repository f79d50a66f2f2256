"""Streaming reader of the arrays of a JSON file, which may be larger than memory."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Collection, Iterator
from typing import IO, Any

from torch_dpflow._core.depth import is_too_deep, may_be_too_deep

#: Bytes that are read at a time.
_BLOCK = 2**18
#: Maximum characters of an element, so that malformed JSON cannot fill the memory.
_MAX_ELEMENT = 2**26
#: A number at the end of the text in memory may continue after it: 0 may begin 0.5, and 1 may begin 1e+5.
_NUMBER_TAIL = len("e+")

_SPACE = re.compile(r"[ \t\n\r]*")


def _no_number(name: str) -> Any:
    raise ValueError(f"it holds {name}, which is no JSON; write null or leave it out")


def _object(members: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(members)
    if len(found) < len(members):
        names = [name for name, _ in members]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"an object has {twice!r:.80} twice; give each name once")
    return found


_SCANNER = json.JSONDecoder(parse_constant=_no_number, object_pairs_hook=_object)


def read_arrays(file: IO[bytes], names: Collection[str]) -> Iterator[tuple[str, Any]]:
    """Yield (name, element) for the arrays `names` in the object of a JSON file, in the file's order.

    The file is read once; one block of it and one element are in memory. Other JSON parsers build a document as a
    whole, or build elements in Python from events. Here `json`'s C scanner decodes one element after the other, which
    is as fast as decoding the whole (240 MB of COCO: 12 s, with ijson 67 s).

    Raises:
        ValueError: the file is no JSON object, has a name twice in one object, or ends in its middle.
    """
    text = _Text(file)
    text.expect("{")
    if text.skip_if("}"):
        return text.expect("")
    passed: set[str] = set()
    while True:
        name = text.name()
        if name in passed:
            raise ValueError(f"it has {name!r:.80} twice; give each name once")
        passed.add(name)
        text.expect(":")
        if text.skip_if("["):
            for element in _elements(text):
                if name in names:
                    yield name, element
        else:
            text.value()
        if not text.skip_if(","):
            break
    text.expect("}")
    text.expect("")


def _elements(text: _Text) -> Iterator[Any]:
    """Yield the elements of an array after its opening bracket."""
    if text.skip_if("]"):
        return
    yield text.value()
    while text.skip_if(","):
        yield text.value()
    text.expect("]")


class _Text:
    """A part of the text of a file, with the reader's position."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()  # some tools write a byte-order mark
        self._text = ""
        self._at = 0
        #: characters before it
        self._passed = 0
        self._ended = False

    def skip_if(self, character: str) -> bool:
        """Skip `character` if it is next. Returns whether it was."""
        if self._next() != character:
            return False
        self._at += 1
        return True

    def expect(self, character: str) -> None:
        """Skip `character` ("": the end of the file). Raises ValueError if it is not next."""
        if not self.skip_if(character):
            raise self._malformed(f"expected {repr(character) if character else 'its end'}", self._at)

    def name(self) -> str:
        """Return the next value, a name. Raises ValueError if it is no string."""
        if self._next() != '"':
            raise self._malformed("expected a name in quotes", self._at)
        return str(self.value())

    def value(self) -> Any:
        """Return the next value."""
        self._next()
        while True:
            try:
                value, end = _SCANNER.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                if self._ended or len(self._text) - self._at > _MAX_ELEMENT:
                    raise self._malformed(error.msg, error.pos) from None
            except RecursionError:
                raise self._malformed("a value is nested too deeply", self._at) from None
            else:
                if may_be_too_deep(self._text[self._at : end]) and is_too_deep(value):
                    raise self._malformed("a value is nested too deeply", self._at)
                if end + _NUMBER_TAIL < len(self._text) or self._ended:
                    self._at = end
                    return value
            self._read()

    def _next(self) -> str:
        """Return the next character that is no space; "" at the end of the file."""
        while True:
            found = _SPACE.match(self._text, self._at)
            assert found is not None
            self._at = found.end()
            if self._at < len(self._text) or self._ended:
                return self._text[self._at : self._at + 1]
            self._read()

    def _read(self) -> None:
        """Drop the text before the position and double the rest, so that a long value is not scanned too often."""
        rest = self._text[self._at :]
        data = self._file.read(max(_BLOCK, len(rest)))
        self._ended = not data
        self._passed += self._at
        self._text = rest + self._decoder.decode(data, final=self._ended)
        self._at = 0

    def _malformed(self, what: str, at: int) -> ValueError:
        if self._ended and (at >= len(self._text) or what.startswith("Unterminated")):
            return ValueError(f"it ends in its middle, after {self._passed + len(self._text)} characters")
        return ValueError(f"{what} at character {self._passed + at}")
