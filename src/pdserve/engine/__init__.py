"""The engine: one forward pass at a time over a paged KV cache that other processes may read and write.

Owns the rank processes, their regions, the kernels' use and the sampler. Knows nothing of handoffs, fabric or wire:
that a layer is done it says by the layer counter alone. The worker sees `port.py` and `client.py`, which load no torch.
Start with `port.py`, then `rank_group.py` for the processes and `runner.py` for a pass.
"""
