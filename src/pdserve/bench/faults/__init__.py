"""Real processes, faults at chosen moments, and what must be true afterwards: what `pdserve verify-faults` does.

Knows processes, HTTP and signals, nothing of what is inside a worker but the names of its handoff states.
Start with `fleet`, the processes.
"""
