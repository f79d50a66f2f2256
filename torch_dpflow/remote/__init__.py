"""Workers beyond this host: what starts them, what they run, and what is shipped to them."""

from torch_dpflow._core.lazy import refuse_copy

refuse_copy(__name__)
