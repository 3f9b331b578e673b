"""How many workers of which parallelism a load needs, prefill and decode apart or together.

Owns the search: bounds from the performance model first, then the fleet simulation of the few that are left. Must not
know engines or networks. Start reading at `goal`, then `search`.
"""
