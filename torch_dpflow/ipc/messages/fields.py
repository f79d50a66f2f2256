"""Types of fields with their limits, and the base of the bodies of calls."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

from torch_dpflow._core.checks import MAX_SECONDS

#: Longest name of a method, and longest text of an error, characters.
MAX_NAME, MAX_TEXT = 200, 32 * 1024
#: Maximum samples that one message names.
MAX_SAMPLES = 1 << 14
#: Maximum ranks of one job.
MAX_RANKS = 1024
#: Prefix of the names that are generated for jobs without one.
UNNAMED = "unnamed-"

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Name: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME)]
Text: TypeAlias = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=MAX_SECONDS)]
SampleKeys: TypeAlias = Annotated[list[Count], msgspec.Meta(max_length=MAX_SAMPLES)]


class Body(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    """A call's arguments or result: an array on the wire; unknown fields are an error."""
