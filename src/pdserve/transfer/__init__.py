"""The messenger: moves the KV of one request from a prefill worker to a decode worker.

Owns: the handoff states of both sides, which pages a chunk completes, immediates, tail slots, quarantine; it knows at
each moment who may write where.
Must not know: our scheduler, engine and worker; it is used by connectors to other engines too.
Start with `handoff` (the two tables), then `receiver` (decode side) and `sender` (prefill side).
"""
