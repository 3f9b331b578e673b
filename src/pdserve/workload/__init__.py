"""What a load is: when each request comes, how long it is, and which prefix it shares with which others.

Owns arrival processes, length distributions, and the readers of public traces. Must not know servers, clients or
engines: the load generator sends a workload, the fleet simulator replays it, the planner sizes a fleet for it. Start
reading at `request`.
"""
