"""Run `dpflow`, as `python -m torch_dpflow.cli`."""

from torch_dpflow.cli import main

main()
