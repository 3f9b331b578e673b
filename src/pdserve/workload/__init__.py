"""What a load is: when each request comes, how long it is, which prefix it shares with others, and what is asked of it.

Owns arrival processes, length distributions, the readers of public traces, and objectives. Must not know servers,
clients or engines: the load generator sends a workload, the fleet simulator replays it, the planner sizes a fleet for
it. Start reading at `request`.
"""
