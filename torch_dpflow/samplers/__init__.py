"""samplers"""

if __name__ != "torch_dpflow.samplers":
    raise ImportError(
        f"{__name__!r} was imported from the repository's root; import 'torch_dpflow.samplers' instead "
        "(a second copy of its classes would unpickle nowhere)"
    )
