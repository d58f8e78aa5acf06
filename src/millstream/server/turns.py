"""Short turns on the processor, for a process that does little at a time and is waited for.

Linux gives every thread the same share of a processor in turns of some milliseconds.  A broker that is woken while
another program is in the middle of its turn waits for the end of it, although it would be done in a tenth of the time:
with a sync it is woken three times for each message, and the slowest of a hundred messages waits that long.  A thread
that asks for shorter turns is let in at once.  It gets no larger share by that, and needs no rights for it.
"""

from __future__ import annotations

import ctypes
import platform
from struct import Struct
from typing import Final

__all__ = ["take_short_turns"]

#: Longer than the broker needs for a request, much shorter than the turns of others (1.4 ms and more).
_TURN_US: Final = 200

#: size, policy, flags, nice, priority, runtime, deadline, period: the first version of the kernel's `sched_attr`.
_ATTRIBUTES: Final = Struct("=IIQiIQQQ")
#: The numbers of sched_setattr and sched_getattr, which the C library of many systems does not know by name.
_CALLS: Final = {"x86_64": (314, 315), "aarch64": (274, 275), "riscv64": (274, 275)}
_POLICY_OTHER: Final = 0


def take_short_turns() -> bool:
    """Ask for short turns for this thread and those it starts; whether they are granted.

    Older kernels than 6.12 know nothing of it.  Who was given a policy of his own by an operator keeps it.
    """
    calls = _CALLS.get(platform.machine())
    if calls is None or platform.system() != "Linux":
        return False
    set_attributes, get_attributes = calls
    call = ctypes.CDLL(None).syscall
    this_thread, no_flags = 0, 0
    memory = ctypes.create_string_buffer(_ATTRIBUTES.size)
    if call(get_attributes, this_thread, memory, len(memory.raw), no_flags) != 0:
        return False
    _, policy, flags, nice, priority, _, deadline, period = _ATTRIBUTES.unpack(memory.raw)
    if policy != _POLICY_OTHER:
        return False
    wanted_ns = _TURN_US * 1000
    wanted = _ATTRIBUTES.pack(len(memory.raw), policy, flags, nice, priority, wanted_ns, deadline, period)
    if call(set_attributes, this_thread, ctypes.create_string_buffer(wanted, len(wanted)), no_flags) != 0:
        return False
    # A kernel that does not know the wish accepts it without a word.
    call(get_attributes, this_thread, memory, len(memory.raw), no_flags)
    granted_ns: int = _ATTRIBUTES.unpack(memory.raw)[5]
    return granted_ns == wanted_ns
