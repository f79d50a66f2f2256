"""caches"""

if __name__ != "torch_dpflow.caches":
    raise ImportError(
        f"{__name__!r} was imported from the repository's root; import 'torch_dpflow.caches' instead "
        "(a second copy of its classes would unpickle nowhere)"
    )
