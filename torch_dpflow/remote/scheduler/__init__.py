"""QMOWS: which worker loads which task (thesis 3.4.1: queue mirrors, over-allocation, work stealing).

A pure state machine: `handle(event)` returns what to do, in order, and there is no socket, thread or clock
inside. The life of a task::

    Submit ──> global queue ──────────> a worker's window ──> Exchanged ──> Deliver
       │                                 ▲    │     ▲
       └─pinned─> reserved for a worker ─┘    │     └── stolen or taken over from another window
                                              └─ Lose: back to where it came from, in its old place

**Windows.** A worker holds up to `window` tasks, running and waiting, so that it never idles for a round
trip. The scheduler keeps a mirror of each worker's local queue and refills windows whenever one has room, on
any event: first with tasks pinned to that worker, then from the global queue, oldest task to emptiest window.

**Stealing.** Only an idle worker steals, when nothing is queued. A busy one would only move the choice of
worker forward, and two half-full workers would pass the same task to and fro. It takes one task: the last of
the longest mirror, among equals of the one that has been stuck longest. That the last and not the oldest
waiting task is taken surprises, since in-order consumers need the oldest first. But the oldest is the one
that its holder starts next: moving it gains little, and too often the holder has started it by then. In
simulation (skewed costs, bounded lookahead, in-order delivery) the time to the end is the same to about 1 %,
but several times as many tasks are loaded twice. `python -m benchmarks.scheduler` repeats it.

**Over-allocation.** The victim is told at once (the thesis tells it at its next exchange), but may have
started the task meanwhile. Then it runs twice and the first result wins.

**Overtaking.** A worker that was frozen, or whose storage hangs, holds tasks that somebody waits for, and the
others may never be idle. With `overtake_after_s`, one that has been at one task for so long, and for several
times as long as tasks usually take, is given nothing more until it exchanges: what waits behind the task goes
back to the queue, and the task is copied to whoever has room first.

**Time limit.** Code that hangs never exchanges, and with an overtaken copy it takes two workers out of service. With
`task_timeout_s`, a worker that has been at one task for so long is to be killed, also where nobody wants the task any
more. The rest is a loss as any other: the task is a suspect, and given up when the limit of losses is reached. With
three losses and an overtaken copy a consumer in order waits for two time limits. A third copy at once would halve
that, but occupy one worker more over each slow sample, and all three would fail of one outage of a storage.

**Loss.** The window of a lost worker goes back in its old order, before everything newer. The task that it
ran is a suspect from then on and runs alone: it is given to an empty worker only, and nothing joins it.
Otherwise, where workers hand in results N at a time and the scheduler is mistaken about what ran, a task that
kills workers could see its neighbours condemned for it.
"""

from torch_dpflow.remote.scheduler.events import (
    AddWorker,
    Assign,
    CancelTasks,
    Deliver,
    Discard,
    Exchanged,
    IdleWorkers,
    KillWorker,
    Lose,
    Poison,
    Revoke,
    SchedulerEvent,
    SchedulerInstruction,
    Submit,
    TaskId,
    Tick,
    WorkerId,
)
from torch_dpflow.remote.scheduler.machine import Counters, Scheduler

__all__ = [
    "Assign",
    "CancelTasks",
    "Counters",
    "Deliver",
    "Discard",
    "SchedulerEvent",
    "Exchanged",
    "SchedulerInstruction",
    "AddWorker",
    "KillWorker",
    "Lose",
    "Poison",
    "Revoke",
    "Scheduler",
    "IdleWorkers",
    "Submit",
    "TaskId",
    "Tick",
    "WorkerId",
]
