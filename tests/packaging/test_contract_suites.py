"""The contract suites that the library ships: what they need, and what they say where it is missing."""

from __future__ import annotations

import subprocess
import sys

SUITES = ("samplers", "policies")
NEEDED = ("pytest", "hypothesis")
#: What is installed for development, and not for users.
EXTRAS = ("torchvision", "PIL", "scipy", "matplotlib", "rich", "torchdata", "lightning", "sklearn")

# One process for all, because importing torch takes seconds.
PROGRAM = f"""
import importlib, sys
for missing in {NEEDED!r}:
    sys.modules[missing] = None
    for suite in {SUITES!r}:
        try:
            importlib.import_module("torch_dpflow.testing." + suite)
        except ImportError as error:
            print(error)
    del sys.modules[missing]
sys.modules.update(dict.fromkeys({EXTRAS!r}))
for suite in {SUITES!r}:
    importlib.import_module("torch_dpflow.testing." + suite)
"""


def test_a_suite_needs_two_packages_more_than_the_library_and_names_the_one_it_lacks() -> None:
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=250)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == [
        f"torch_dpflow.testing.{suite} needs pytest and hypothesis, and {missing} is not installed: "
        "pip install 'torch_dpflow[testing]'"
        for missing in NEEDED
        for suite in SUITES
    ]
