"""Dense decoder models: what a directory holds, its weights, and the forward pass in plain torch.

Knows nothing of pages, batches of requests or transport: attention is a function that the caller passes in.
Only `decoder`, `rope` and `weights` import torch; what a worker or the gateway needs (`source`, `config`) does not.
Start with `config.py`, then `decoder.py`.
"""
