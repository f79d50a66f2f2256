"""Types of fields with their limits."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

from torch_dpflow._core.checks import MAX_SECONDS

#: Longest name of a method, and longest text of an error, characters.
MAX_NAME, MAX_TEXT = 200, 32 * 1024


Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


Name: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME)]


Text: TypeAlias = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]


Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=MAX_SECONDS)]
