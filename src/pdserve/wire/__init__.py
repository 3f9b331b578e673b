"""Every message that crosses a process between workers and gateway, with its bounds, and the connection it travels on.

Must not know what a message causes: handoffs, routing and requests are decided by those who receive.
Start reading at `peer.py` (decode to prefill) and `cluster.py` (worker to gateway), then `codec.py`, `channel.py`,
`acceptor.py` and `authentication.py`.
"""
