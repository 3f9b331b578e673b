"""Which workers take a request, by what the registry says of their loads.

Must not know connections, messages or time; the caller dispatches, and tells the registry what it dispatched.
Start reading at `least_loaded.py`.
"""
