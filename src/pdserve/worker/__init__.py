"""A worker process: roles, engine, fabric and channels under one real clock.

Owns: the event loop, the connections to gateway and peers, the HTTP endpoints.
Must not load torch: the engine is a process of its own.
Start with `core` (what is decided), then `process` (what drives it).
"""
