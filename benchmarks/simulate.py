"""Simulate jobs that share a data set: `python -m benchmarks.simulate --help`."""

from benchmarks.simulation.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
