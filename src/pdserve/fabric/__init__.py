"""One-sided writes with counted arrivals: the port, libfabric behind it, and a network with faults in one process.

Knows nothing of requests, handoffs, engines or messages between workers. Start reading in `port.py`; then `native.py`
(thin; the work is in `native/fabric/`, whose `engine.h` comes first) or `memory.py`.
"""
