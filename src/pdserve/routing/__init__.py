"""Which workers take a request: pure functions of a cluster view.

Must not know connections, messages or time; the caller dispatches, and tells the registry what it dispatched.
Start reading at `least_loaded.py`.
"""
