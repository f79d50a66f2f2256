"""Entry point of `python -m torch_dpflow.cli`, which runs `dpflow`."""

from torch_dpflow.cli import main

main()
