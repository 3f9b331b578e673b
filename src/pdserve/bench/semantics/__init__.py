"""The battery of `pdserve verify-semantics`: requests that use every field of the API, and what answers must show.

Knows HTTP and JSON, nothing of what is behind it. Start with `case`; `battery` lists the cases, `sender` sends them.
"""
