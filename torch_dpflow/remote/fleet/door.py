"""Where members call: a listener that admits one key for each of them."""

from __future__ import annotations

import errno
from contextlib import suppress

from torch_dpflow.errors import TransportError
from torch_dpflow.ipc.messages.launch_spec import LaunchSpec, encode_launch_spec
from torch_dpflow.ipc.transport import TransportOptions
from torch_dpflow.ipc.transport.keys import WorkerKeys
from torch_dpflow.ipc.transport.zeromq import ZeroMQListener, draw_key_pair
from torch_dpflow.remote.fleet.reachable import addresses_of, to_bind, to_tell
from torch_dpflow.remote.fleet.remote_content import RemoteContent
from torch_dpflow.remote.fleet.worker_record import RemoteWorker

#: After how long without an answer a member leaves, seconds.
SILENCE_S = 30.0


class PortsInUseError(TransportError):
    """Others listen at all ports at which this one may."""


class Door:
    """A listener with one-time keys, and the launch specs that tell members of it.

    Args:
        listen_at: `tcp://HOST:PORT`, or `tcp://HOST:FIRST-LAST` for the first port that is free.

    Raises:
        OptionError: members cannot reach that address.
        PortsInUseError: others listen there.
        TransportError: it cannot be listened at.
    """

    def __init__(self, listen_at: str) -> None:
        public, secret = draw_key_pair()
        self._keys = WorkerKeys(public=public, secret=secret)
        self.listener = _listen(listen_at, TransportOptions(keys=self._keys))
        #: How members reach it.
        self.addresses = to_tell(listen_at, self.listener.address)

    def launch_spec(
        self, member: RemoteWorker, content: RemoteContent, *, within_s: float, lifetime_s: float | None
    ) -> bytes:
        """A member's launch spec, whose key is good from now on, and for so long unless the member calls."""
        public, secret = draw_key_pair()
        self._keys.expect(member.user, public, within_s)
        return encode_launch_spec(
            LaunchSpec(
                name=member.name,
                role=member.kind.role,
                number=member.number,
                incarnation=member.incarnation,
                addresses=self.addresses,
                server_public=self._keys.public.decode(),
                public=public.decode(),
                secret=secret.decode(),
                start_within_s=within_s,
                lifetime_s=lifetime_s,
                silence_s=SILENCE_S,
                content=content.digest,
                code=content.code_digest,
            )
        )

    def keep(self, member: RemoteWorker) -> None:
        """It has called: its key stays good."""
        self._keys.keep(member.user)

    def drop(self, member: RemoteWorker) -> None:
        """Its key is good no more."""
        self._keys.drop(member.user)


def _listen(asked: str, options: TransportOptions) -> ZeroMQListener:
    *others, last = addresses_of(to_bind(asked))
    for address in others:
        with suppress(TransportError):
            return ZeroMQListener(address, options)
    try:
        return ZeroMQListener(last, options)
    except TransportError as error:
        if getattr(error.__cause__, "errno", 0) != errno.EADDRINUSE:
            raise
        raise PortsInUseError(
            f"no port of {asked} is free ({len(others) + 1} in all), and whoever is called by workers takes one"
        ) from error
