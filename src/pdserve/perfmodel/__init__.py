"""How long a pass of an engine and a push over a link take, with the source of each number.

Owns measured tables and what is fitted to them. Must not know schedulers, requests or clocks: the fleet simulator and
the planner ask it for durations. Start reading at `port`.
"""
