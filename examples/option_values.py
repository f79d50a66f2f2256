"""Parsers of the examples' options, which refuse values that make no sense."""

import math
from argparse import ArgumentParser, ArgumentTypeError

from torch_dpflow.cluster.security.connection_file import find_cluster
from torch_dpflow.errors import DeadlineError, DPFlowError

#: numpy's generator accepts no higher seed.
HIGHEST_SEED = 2**32 - 1
#: Timeout for the answer of a running cluster, seconds.
ANSWER_S = 10.0


def positive(text: str) -> int:
    """Parse a whole number from 1."""
    value = int(text)
    if value < 1:
        raise ArgumentTypeError(f"{value}: at least 1 is needed")
    return value


def not_negative(text: str) -> int:
    """Parse a whole number from 0."""
    value = int(text)
    if value < 0:
        raise ArgumentTypeError(f"{value}: at least 0 is needed")
    return value


def seed(text: str) -> int:
    """Parse a whole number that seeds every generator."""
    value = int(text)
    if not 0 <= value <= HIGHEST_SEED:
        raise ArgumentTypeError(f"{value}: give a whole number from 0 to {HIGHEST_SEED}")
    return value


def rate(text: str) -> float:
    """Parse a finite number above 0, such as a learning rate."""
    value = float(text)
    if not 0 < value < math.inf:
        raise ArgumentTypeError(f"{text}: give a finite number above 0")
    return value


def weight(text: str) -> float:
    """Parse a finite number from 0, such as a weight decay."""
    value = float(text)
    if not 0 <= value < math.inf:
        raise ArgumentTypeError(f"{text}: give a finite number, 0 or more")
    return value


def share(text: str) -> float:
    """Parse a number from 0 to 1."""
    value = float(text)
    if not 0 <= value <= 1:
        raise ArgumentTypeError(f"{text}: give a number from 0 to 1")
    return value


def address(text: str) -> str:
    """Check the connection file of a cluster, or "auto"."""
    try:
        find_cluster(text)
    except DPFlowError as error:
        raise ArgumentTypeError(str(error)) from error
    return text


def require_answer(parser: ArgumentParser, address: str | None) -> None:
    """Exit with a message if an address names a cluster that does not answer; None names no cluster."""
    if address is None:
        return
    try:
        with find_cluster(address).connect(timeout_s=ANSWER_S) as coordinator:
            coordinator.call("processes")
    except DeadlineError:
        parser.error(f"--address {address}: no cluster answers there within {ANSWER_S:g} s; start one by `dpflow up`")
    except DPFlowError as error:
        parser.error(f"--address {address}: {error}")


def address_or_new(text: str) -> str:
    """Check an address as `address` does; "auto" is allowed without a cluster."""
    return text if text == "auto" else address(text)
