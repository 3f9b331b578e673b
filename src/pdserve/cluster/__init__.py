"""Who serves: workers with leases and incarnations, and an immutable view of them. Sans-IO.

Must not know connections, requests, or how a worker is chosen: messages and the time come in, changes go out.
Start reading at `view.py`, then `registry.py`.
"""
