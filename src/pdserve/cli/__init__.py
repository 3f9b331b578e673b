"""The `pdserve` command: one file a subcommand; the only place that may import everything.

Owns: flags, what is printed, exit statuses, log handlers. Start with `main`.
"""
