"""Makes a platform of a launcher: its blocking calls run in threads, and what comes of them is news."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from torch_dpflow._core import descriptors
from torch_dpflow._core.backoff import Backoff
from torch_dpflow._core.threads import AwaitedThread
from torch_dpflow.errors import AnswerLostError, OptionError, PlatformError
from torch_dpflow.log import SERVICE
from torch_dpflow.remote.launchers.contract import (
    Accepted,
    Answerless,
    Ended,
    Fate,
    Launcher,
    Outcome,
    RateLimit,
    Ref,
    Refused,
    Warned,
)
from torch_dpflow.workers.platform import End

#: How long a start may take, seconds.
DEADLINE_S = 60.0
#: The pauses between looks at members that are suspected or have been stopped, first and longest; how often to look at
#: all of them; seconds.
FIRST_LOOK_S, LOOK_S, SWEEP_S = 0.1, 1.0, 60.0
#: How long a suspicion lasts, and how long a platform may take to confirm that a member is gone, seconds.
SUSPECT_S, CONFIRM_S = 10.0, 10.0
#: How long closing may take at most, if not twice the deadline of a start; seconds.
CLOSE_S = 60.0
#: The longest pause after a failed stop or look, seconds.
LONGEST_PAUSE_S = 10.0


@dataclass(eq=False)
class _Asked:
    """A member that was asked for and has not ended."""

    name: str
    #: Emptied once it was sent: it has a key.
    launch_spec: bytes = field(repr=False)
    ref: Ref | None = None
    #: Whether the platform may have it and no start of it is awaited: it can be looked at and stopped.
    there: bool = False
    #: When its start is taken for lost, seconds, and whether it was.
    overdue_at: float = 0.0
    overdue: bool = False
    #: Why it is to be stopped; None while it is not.
    why: str | None = None
    #: Whether the platform has accepted to stop it.
    stopped: bool = False
    warned: bool = False
    #: Whether the last that there is to tell has been told.
    told: bool = False
    backoff: Backoff = field(default_factory=lambda: Backoff(0.5, LONGEST_PAUSE_S))


class ThreadedPlatform:
    """The `RemotePlatform` of a launcher, which it closes at the end.

    One thread decides which call is next, and each call has a thread of its own, so that one that hangs holds up no
    other: a start counts as lost after `deadline_s`, and can be stopped by its name then. Stops come first, and are
    repeated until the platform has accepted them; starts are never repeated.

    Args:
        deadline_s: how long a start may take, seconds.
        sweep_s: how often to look at all members, seconds.

    Raises:
        DescriptorLimitError: this process has too many files open.
    """

    def __init__(
        self, launcher: Launcher, *, deadline_s: float = DEADLINE_S, sweep_s: float = SWEEP_S
    ) -> None:
        self.limits = launcher.limits
        try:
            self.wakeup_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        except OSError as error:
            if descriptors.is_exhausted(error):
                raise descriptors.exhausted("no member can be started") from error
            raise
        self._launcher = launcher
        self._deadline_s = deadline_s
        self._sweep_s = sweep_s
        self._rate = RateLimit(launcher.limits.starts_per_s)
        #: Guards all that follows; notified when any of it changes.
        self._changed = threading.Condition()
        self._members: dict[str, _Asked] = {}
        #: Names to be started, in order; to be stopped, and when; suspected, and until when.
        self._queue: dict[str, None] = {}
        self._to_stop: dict[str, float] = {}
        self._suspects: dict[str, float] = {}
        self._look_at, self._sweep_at = 0.0, time.monotonic() + sweep_s
        self._looking = False
        self._look_pause_s = FIRST_LOOK_S
        #: Starts under way that are not overdue, and all calls.
        self._starting: dict[str, _Asked] = {}
        self._threads: set[AwaitedThread] = set()
        self._hung = 0
        self._news: list[Outcome] = []
        #: Whether `close` has begun, and whether it has released the descriptor.
        self._closed = self._released = False
        self._owner = os.getpid()
        self._thread = AwaitedThread(self._run, name="dpflow-calls")
        self._thread.start()

    # -- for the owner -----------------------------------------------------------------------------------

    def start(self, name: str, launch_spec: bytes) -> None:
        if len(launch_spec) > self.limits.max_launch_spec_bytes:
            raise OptionError(
                f"the launch spec of {name} has {len(launch_spec)} bytes; at most "
                f"{self.limits.max_launch_spec_bytes} are allowed"
            )
        with self._changed:
            if self._closed:
                raise OptionError(f"{name} cannot be started: its platform is closed")
            if name in self._members:
                raise OptionError(f"{name} cannot be started again: give each member a name of its own")
            self._members[name] = _Asked(name, launch_spec)
            self._queue[name] = None
            self._changed.notify_all()

    def stop(self, name: str, why: str = "") -> None:
        with self._changed:
            member = self._members.setdefault(name, _Asked(name, b"", there=True, told=True))
            self._want_stop(member, why)

    def adopt(self, name: str, ref: Ref | None) -> None:
        with self._changed:
            self._members.setdefault(name, _Asked(name, b"", ref=ref, there=True))
            self._changed.notify_all()

    def suspect(self, name: str) -> None:
        with self._changed:
            if name in self._members:
                self._suspect(name, SUSPECT_S)

    def take(self) -> list[Outcome]:
        with self._changed:
            news, self._news = self._news, []
            if news and not self._released:
                os.eventfd_read(self.wakeup_fd)
            return news

    def close(self, *, grace_s: float = 0.0) -> None:
        if os.getpid() != self._owner:
            return  # a fork has no threads, and the members are its parent's
        with self._changed:
            if self._closed:
                return
            self._closed = True
            for name in [*self._queue]:
                self._want_stop(self._members[name], "its platform is closed")
            if grace_s > 0:
                for name in [*self._members]:
                    self._suspect(name, grace_s)
                self._changed.wait_for(lambda: not self._members, grace_s)
            for member in [*self._members.values()]:
                self._want_stop(member, "its platform is closed")
            self._changed.wait_for(lambda: not self._members, max(2 * self._deadline_s, CLOSE_S))
            left = sorted(self._members)
            self._members.clear()
            self._changed.notify_all()
        if left:
            SERVICE.error("not known to be stopped: %s; they end once nobody answers them", ", ".join(left))
        self._thread.wait(self._deadline_s)
        with self._changed:
            threads, hung = [*self._threads], self._hung
        for thread in threads:
            thread.wait(0.0 if hung else self._deadline_s)
        self._launcher.close()
        with self._changed:
            self._released = True
            os.close(self.wakeup_fd)

    # -- the deciding thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        with self._changed:
            while not self._closed or self._members:
                now = time.monotonic()
                self._give_up(now)
                call = self._next(now)
                if call is None:
                    self._changed.wait(self._idle_s(now))
                    continue
                thread = AwaitedThread(partial(self._do, call), name="dpflow-call")
                self._threads.add(thread)
                try:
                    thread.start()
                except (
                    RuntimeError
                ):  # no thread can be had, as at the interpreter's end, when members are to be stopped
                    self._threads.discard(thread)
                    self._changed.release()
                    try:
                        call()
                    finally:
                        self._changed.acquire()

    def _do(self, call: Callable[[], None]) -> None:
        try:
            call()
        finally:
            with self._changed:
                self._threads.discard(threading.current_thread())
                self._changed.notify_all()

    def _next(self, now: float) -> Callable[[], None] | None:
        """The call that is next; None if none is due or may be made."""
        # Each hung call is replaced by another, up to as many again.
        most = self.limits.calls_at_once
        free = most - len(self._threads) + min(self._hung, most)
        if free <= 0:
            return None
        for name, due in self._to_stop.items():
            if due <= now and self._members[name].there:
                del self._to_stop[name]
                return partial(self._stop, self._members[name])
        if self._is_look_due(now):
            return self._look_call(now)
        # One call is kept for stops and looks: where starts take long, they would come too late.
        if self._queue and (most == 1 or free > 1) and self._rate.wait_s(now) <= 0:
            name = next(iter(self._queue))
            del self._queue[name]
            self._rate.note(now)
            member = self._starting[name] = self._members[name]
            member.overdue_at = now + self._deadline_s
            return partial(self._start, member)
        return None

    def _idle_s(self, now: float) -> float | None:
        """How long until something is due, at most, seconds."""
        waits = [due - now for due in self._to_stop.values()]
        waits += [member.overdue_at - now for member in self._starting.values()]
        waits += [until - now for until in self._suspects.values()]
        if self._queue:
            waits.append(self._rate.wait_s(now))
        if self._members and self.limits.can_watch and not self._looking:
            waits.append((self._look_at if self._suspects else self._sweep_at) - now)
        # What is due now waits for a call to end, which notifies.
        return min((wait for wait in waits if wait > 0), default=None)

    def _give_up(self, now: float) -> None:
        """Take overdue starts for lost, and suspicions for answered."""
        for name, member in [*self._starting.items()]:
            if now >= member.overdue_at:
                del self._starting[name]
                member.overdue = True
                self._hung += 1
                self._lost(member, f"no answer in {self._deadline_s:g} s")
        for name in [name for name, until in self._suspects.items() if now >= until]:
            del self._suspects[name]
            member = self._members[name]
            if member.stopped:
                self._ended(member, End())

    # -- the calls, each in a thread of its own; what they find is entered under the lock ------------------

    def _start(self, member: _Asked) -> None:
        launch_spec, member.launch_spec = member.launch_spec, b""
        ref: Ref | None = None
        refused: PlatformError | None = None
        text = ""
        try:
            ref = self._launcher.start(member.name, launch_spec, deadline_s=self._deadline_s)
        except AnswerLostError as error:
            text = str(error)
        except PlatformError as error:
            refused = error
        except Exception as error:  # a fault of the launcher: the member may have been started
            text = f"{type(error).__name__}: {error}"
        with self._changed:
            self._starting.pop(member.name, None)
            self._hung -= member.overdue
            if refused is not None:
                self._forget(member)
                self._tell_last(member, Refused(member.name, refused))
            elif ref is not None:
                self._accepted(member, ref)
            elif not member.overdue:
                self._lost(member, text)
            is_stray = self._closed and member.name not in self._members
        if ref is not None and is_stray:
            failure = self._failure_of(lambda: self._launcher.stop(member.name, ref))
            SERVICE.error(
                "%s was started after its platform was closed: %s", member.name, failure or "stopped"
            )

    def _accepted(self, member: _Asked, ref: Ref) -> None:
        if member.told and member.why is None:
            return  # it has ended before its start was answered
        member.ref, member.there, member.stopped = ref, True, False
        if not self._closed:
            self._members.setdefault(member.name, member)  # stopped and forgotten before it had begun
        if member.why is None:
            self._tell(Accepted(member.name, ref))
        elif member.name in self._members:
            self._want_stop(member, member.why)

    def _lost(self, member: _Asked, text: str) -> None:
        member.there = True
        if member.why is None:
            self._tell(Answerless(member.name, text))

    def _stop(self, member: _Asked) -> None:
        failure = self._failure_of(lambda: self._launcher.stop(member.name, member.ref))
        with self._changed:
            if self._members.get(member.name) is not member:
                return  # it has ended meanwhile
            if failure:
                if member.backoff.failures == 0:
                    SERVICE.warning("%s cannot be stopped, tried again: %s", member.name, failure)
                self._to_stop[member.name] = time.monotonic() + member.backoff.pause_s()
                return
            member.stopped = True
            if self.limits.can_watch:
                self._suspect(member.name, CONFIRM_S)
            else:
                self._ended(member, End())

    def _is_look_due(self, now: float) -> bool:
        if self._looking or not self.limits.can_watch:
            return False
        return (bool(self._suspects) and now >= self._look_at) or (
            bool(self._members) and now >= self._sweep_at
        )

    def _look_call(self, now: float) -> Callable[[], None]:
        sweeps = now >= self._sweep_at
        names = self._members if sweeps else self._suspects
        asked = {name: member for name in names if (member := self._members[name]).there}
        self._looking = True
        if sweeps:
            self._sweep_at = now + self._sweep_s
        return partial(self._look, asked, {name for name, member in asked.items() if member.stopped})

    def _look(self, asked: Mapping[str, _Asked], stopped: Collection[str]) -> None:
        fates: Mapping[str, Fate] = {}

        def look() -> None:
            nonlocal fates
            fates = self._launcher.look({name: member.ref for name, member in asked.items()})

        failure = self._failure_of(look) if asked else ""
        with self._changed:
            self._looking = False
            self._look_at = time.monotonic() + self._look_pause_s
            self._look_pause_s = min(2 * self._look_pause_s, LONGEST_PAUSE_S if failure else LOOK_S)
            if failure:
                SERVICE.debug("members cannot be looked at: %s", failure)
                return
            for name, member in asked.items():
                if self._members.get(name) is member:
                    # Missing tells something only of who was stopped before, and has not been started since.
                    is_gone = name in stopped and member.stopped
                    self._note(member, fates.get(name, Fate(end=End() if is_gone else None)))

    def _note(self, member: _Asked, fate: Fate) -> None:
        if fate.end is not None:
            self._ended(member, fate.end)
        elif fate.until_s is not None and not member.warned:
            member.warned = True
            self._tell(Warned(member.name, fate.until_s))

    # -- under the lock ----------------------------------------------------------------------------------

    def _want_stop(self, member: _Asked, why: str) -> None:
        member.why = member.why or why
        if member.name in self._queue:
            self._ended(member, End())
        elif not member.stopped:
            self._to_stop.setdefault(member.name, time.monotonic())
        self._changed.notify_all()

    def _suspect(self, name: str, for_s: float) -> None:
        now = time.monotonic()
        if not self.limits.can_watch:
            return
        if name not in self._suspects:
            self._look_at, self._look_pause_s = min(self._look_at, now), FIRST_LOOK_S
        self._suspects[name] = max(self._suspects.get(name, 0.0), now + for_s)
        self._changed.notify_all()

    def _ended(self, member: _Asked, end: End) -> None:
        self._forget(member)
        self._tell_last(member, Ended(member.name, replace(end, killed_for=member.why or "")))

    def _forget(self, member: _Asked) -> None:
        self._members.pop(member.name, None)
        self._queue.pop(member.name, None)
        self._to_stop.pop(member.name, None)
        self._suspects.pop(member.name, None)

    def _tell_last(self, member: _Asked, outcome: Outcome) -> None:
        if not member.told:
            member.told = True
            self._tell(outcome)
        self._changed.notify_all()

    def _tell(self, outcome: Outcome) -> None:
        if not self._news and not self._released:
            os.eventfd_write(self.wakeup_fd, 1)
        self._news.append(outcome)

    def _failure_of(self, call: Callable[[], None]) -> str:
        """Make a call; what went wrong, empty if nothing did."""
        try:
            call()
        except Exception as error:  # a launcher's faults too: a stop is repeated whatever happens
            return f"{type(error).__name__}: {error}"
        return ""
