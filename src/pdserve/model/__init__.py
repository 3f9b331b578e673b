"""Dense decoder models: what a directory holds, its weights, and the forward pass in plain torch.

Knows nothing of pages, batches of requests or transport: attention is a function that the caller passes in.
Nothing here imports torch except `decoder` and `weights`; `source`, `config`, `smollm2` and `fingerprint` do not.
Start with `config.py`, then `decoder.py`.
"""
