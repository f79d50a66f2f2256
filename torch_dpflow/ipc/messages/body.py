"""The base of all bodies of calls."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

from torch_dpflow.ipc.messages.fields import Count

#: Most samples that one message names.
MAX_SAMPLES = 1 << 14


SampleKeys: TypeAlias = Annotated[list[Count], msgspec.Meta(max_length=MAX_SAMPLES)]


class Body(msgspec.Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    """A call's arguments or result: an array on the wire; unknown fields are an error."""
