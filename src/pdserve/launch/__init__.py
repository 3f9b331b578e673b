"""Starts the processes of a deployment on this machine, watches them, and stops every one of them.

Owns: child processes and their readiness. Must not know: what a worker or a gateway does; it starts commands.
Start with `deployment`.
"""
