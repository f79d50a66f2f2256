"""Scheduler of a shard: decides which worker loads which task (QMOWS, thesis 3.4.1).

A pure state machine: a method for each event returns instructions, in order; there is no socket, thread or clock
inside. The life of a task::

    submit ──> global queue ──────────> a worker's window ──> exchange ───> Deliver
       │                                 ▲    │     ▲
       └─pinned─> reserved for a worker ─┘    │     └── stolen or taken over from another window
                                              └─ lose: back to where it came from, in its old place

**Windows.** A worker holds up to `window` tasks, one running and the others waiting, so that it never idles for a round
trip. The scheduler keeps a view of each worker's local queue (the thesis's queue mirror). On every event it refills the
windows that have room: first with tasks pinned to that worker, then from the global queue, the oldest task to the
emptiest window.

**Stealing.** Only an idle worker steals, and only if nothing is queued. A busy worker would gain nothing yet, and two
half-full workers would pass the same task back and forth. The thief takes one task: the last of the longest view; of
several such views, the one whose running task is oldest. In-order consumers need the oldest waiting task first, but
that is the one that its holder starts next: moving it gains little, and too often the holder has started it by then. In
simulation (skewed costs, bounded lookahead, in-order delivery) the total time is the same to about 1 %, but several
times as many tasks are loaded twice.

**Over-allocation.** The worker that loses the task gets the revocation at once, but may have started the task. Then the
task runs twice and the first result counts.

**Overtaking.** A worker that is frozen, or whose storage hangs, holds tasks that a job waits for, and the others may
never be idle. With `overtake_after_s`, a worker counts as stuck if it has run one task for that long, and for several
times as long as tasks usually take. It gets nothing more until it exchanges. The tasks behind the running one return to
the queue, and the running task is copied to the first worker with room.

**Time limit.** Code that hangs never exchanges, and with a copy of its task it occupies two workers. With
`task_timeout_s`, a worker that has run one task for that long is killed, even if no job needs the task any more. This
counts as any other loss: the task becomes a suspect, and fails when it has cost `poison_limit` workers. With a limit of
three and a copy, an in-order consumer waits for two time limits.

**Loss.** The window of a lost worker returns to the queue in its old order, before everything newer. The task that it
ran is a suspect from then on and runs alone: only an empty worker gets it, and nothing else with it. Otherwise the
neighbours of a task that kills workers could fail in its place: workers deliver several results at a time, so the
scheduler can be mistaken about what ran.
"""
