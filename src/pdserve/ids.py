"""The identities that cross package borders; each a distinct type so that two of them can't be swapped."""

from typing import NewType

RequestId = NewType("RequestId", str)
"""One client request, given by the gateway; unique in a deployment."""

SequenceId = NewType("SequenceId", int)
"""One sequence inside one worker; never reused within an incarnation."""

HandoffId = NewType("HandoffId", int)
"""One handoff, given by the decode worker; unique within its incarnation."""

WorkerId = NewType("WorkerId", str)
"""The name of a worker; a restarted worker may carry the same one."""

Incarnation = NewType("Incarnation", int)
"""Random 63-bit number drawn at process start; tells a restarted worker from its predecessor (rule H4)."""

Immediate = NewType("Immediate", int)
"""32-bit number that accompanies every write of a handoff: 20 bits slot, 12 bits generation (rule H5)."""

PageIndex = NewType("PageIndex", int)
"""Index of a page in one KV pool, from 0."""

TailSlot = NewType("TailSlot", int)
"""Index of a slot in a tail region, from 0."""
