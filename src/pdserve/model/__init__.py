"""Decoder models: what a directory holds, its weights, and the forward pass in plain torch, whole or one rank's part.

Knows nothing of pages, batches of requests, processes or transport: the KV cache and the communicator are ports that
the caller implements (`attention.py`, `parallel.py`). What a worker or the gateway needs (`source`, `config`,
`checkpoint`) loads no torch.
Start with `config.py`, then `parallel.py` and `decoder.py`; heads that guess tokens: `draft_head.py`.
"""
