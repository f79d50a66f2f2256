"""`python -m torch_dpflow.cli` is `dpflow`."""

from torch_dpflow.cli import main

main()
