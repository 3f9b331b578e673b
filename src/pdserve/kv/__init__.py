"""The KV cache of one rank on paper: the geometry of its bytes and the books of its pages.

Knows nothing of tensors, transfers or requests. Start with `layout`, then `pages`.
"""
