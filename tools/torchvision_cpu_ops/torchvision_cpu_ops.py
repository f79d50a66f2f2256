"""Lets `import torchvision` succeed beside a CPU build of torch.

The packaged torchvision links CUDA libraries; where they are absent its own library does not load, and its
Python side fails with "operator torchvision::nms does not exist". Torch calls the function below when it is
imported (entry-point group `torch.backends`). Transforms, ImageFolder and the models work then; the compiled
operators themselves (decode_jpeg, NMS) do not. Part of the development set-up, never of the library.
"""

import ctypes
import importlib.util
import pathlib

_library = None  # torch.library.Library: the schemas are gone when it is collected


def declare_missing_operators() -> None:
    """Declare the schemas of `nms` and `qnms` unless torchvision's own library loads."""
    global _library
    spec = importlib.util.find_spec("torchvision")
    if spec is None or not spec.submodule_search_locations or _library is not None:
        return
    import torch

    for binary in pathlib.Path(spec.submodule_search_locations[0]).glob("_C*.so"):
        try:
            ctypes.CDLL(str(binary))
        except OSError:
            continue
        return
    _library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        _library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
