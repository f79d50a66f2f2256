"""Another host, as far as the network goes: a namespace with one link to this one, which can be cut."""

from __future__ import annotations

import os
import secrets
import subprocess

import pytest


class Namespace:
    """A network namespace and the link to it.

    Args:
        subnet: the third number of 10.213.N.0/30, which nobody else uses.
    """

    def __init__(self, subnet: int) -> None:
        self.name = f"dpflow-{secrets.token_hex(3)}"
        self._near, self._far = f"dp{secrets.token_hex(3)}", f"dp{secrets.token_hex(3)}"
        #: Of this side of the link.
        self.address = f"10.213.{subnet}.1"
        _ip("netns", "add", self.name)
        try:
            _ip("link", "add", self._near, "type", "veth", "peer", "name", self._far)
            _ip("link", "set", self._far, "netns", self.name)
            _ip("addr", "add", f"{self.address}/30", "dev", self._near)
            _ip("link", "set", self._near, "up")
            self._inside("addr", "add", f"10.213.{subnet}.2/30", "dev", self._far)
            self.mend()
        except BaseException:
            self.remove()
            raise

    @property
    def prefix(self) -> tuple[str, ...]:
        """Runs a command there."""
        return ("ip", "netns", "exec", self.name)

    def cut(self) -> None:
        """Nothing gets through any more, and nobody is told."""
        self._inside("link", "set", self._far, "down")

    def mend(self) -> None:
        """The link is there again."""
        self._inside("link", "set", self._far, "up")

    def disturb(self, *netem: str) -> None:
        """Delay or lose packets, as tc-netem(8) says. Raises CalledProcessError where the kernel cannot."""
        _run("tc", "qdisc", "replace", "dev", self._near, "root", "netem", *netem)

    def remove(self) -> None:
        """Take everything away; the link goes with its end."""
        subprocess.run(["ip", "link", "delete", self._near], check=False, capture_output=True)
        _ip("netns", "delete", self.name)

    def _inside(self, *arguments: str) -> None:
        _ip("-n", self.name, *arguments)


def namespace_or_skip(subnet: int) -> Namespace:
    """A namespace; the test is skipped, with the reason, where this machine makes none."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces take root")
    try:
        return Namespace(subnet)
    except FileNotFoundError:
        pytest.skip("network namespaces take the command `ip` (Debian: iproute2)")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespace can be made here: {error.stderr.strip()}")


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
