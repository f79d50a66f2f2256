"""torch_dpflow: a drop-in replacement for torch.utils.data.DataLoader on elastic workers."""

from torch_dpflow._version import __version__

__all__ = ["__version__"]
