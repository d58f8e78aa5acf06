"""Queues: who holds which message of a partition, what failed and when it is tried again.  Pure: time, storage and
randomness are arguments.

One `Ledger` per queue group and partition.  It never holds messages, only offsets, and those in bulk:

- `settled`  a set of offsets that are done with (ranges.py).  Durable.
- `taken`    the same set and everything that was handed out and is not settled.  What is not taken has never been
  delivered: the backlog costs nothing, however long it is.
- a *parcel* some offsets that share one history: a window of the log and a bitmap.  What is leased is a parcel with a
  consumer and a deadline (leases.py), what came back is a parcel that waits or is ready (returned.py).

How fresh messages are chosen (dispenser.py) is the only thing that differs between queues: in log order (intake.py), by
priority (lanes.py), one per key (keyed.py), in turns (fair.py).  All of them ask `taken`, and none of them owns
anything that could not be found out again from the log.

Durable changes are *facts* (facts.py).  A method decides, applies its facts at once and keeps them for `Ledger.drain`,
which the broker writes to the journal; a restart applies the same facts to nothing (book.py).  Facts that are lost in a
crash mean that messages are delivered again, never that one is lost.

What several consumers get who wait at the same time is in dealing.py.

`letters`, `letter_filters` and `replay_plan` are about dead letters and stand on their own.
"""
