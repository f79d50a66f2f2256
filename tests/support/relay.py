"""A link with latency: packets pass through this process, which holds them up, and loses some if it is told to.

For kernels without netem. At some tens of microseconds a packet, it is for what latency does and
not for measuring throughput. It delays all that TCP does, connecting too, and needs no address of its own.

    python -m tests.support.relay DEVICE OTHER SECONDS LOSS

makes two network devices, of which each gives out after SECONDS what the other is given, but for a share LOSS of the
packets. It writes a line when they are there, reads lines with other SECONDS, and ends, with both, when its input does.
"""

from __future__ import annotations

import fcntl
import os
import random
import select
import struct
import sys
import time
from collections import deque
from contextlib import suppress

#: Of linux/if_tun.h: make a device; of IP packets, without a header before them.
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
#: Longer than any packet.
_LONGEST = 1 << 17
#: A device's queue holds 500 packets: more at once are not read, so that TCP slows down.
_BATCH = 64


def main(device: str, other: str, delay_s: float, loss: float) -> None:
    """Pass packets on until standard input ends."""
    near, far = _tun(device), _tun(other)
    to = {near: far, far: near}
    held: deque[tuple[float, int, bytes]] = deque()
    print(flush=True)
    while True:
        wait_s = max(0.0, held[0][0] - time.monotonic()) if held else None
        readable, _, _ = select.select([0, near, far], [], [], wait_s)
        now = time.monotonic()
        if 0 in readable:
            line = os.read(0, 100)
            if not line:
                return
            delay_s = float(line.split()[-1])
            readable.remove(0)
        for source in readable:
            with suppress(BlockingIOError):
                for _ in range(_BATCH):
                    packet = os.read(source, _LONGEST)
                    if random.random() >= loss:
                        held.append((now + delay_s, to[source], packet))
        while held and held[0][0] <= now:
            _, target, packet = held.popleft()
            with suppress(OSError):  # the device is down, or its queue is full: the packet is lost
                os.write(target, packet)


def _tun(name: str) -> int:
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    return device


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4]))
