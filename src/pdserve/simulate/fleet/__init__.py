"""Fleets of hundreds of workers on a virtual clock: the product's decisions, with durations from a performance model.

Owns what stands in for engines, networks and clients where only durations matter: no KV has content, no token a value.
Must not know faults, which are the world's of `pdserve.simulate.world`. The planner sizes fleets with it. Start reading
at `simulation`, then `world`.
"""
