"""What the operator asks for, and what it resolves to: two frozen types each, neither ever changed.

Owns: defaults with their reasons, how cores are shared out, the environment variables (`environment` alone reads them).
Start with `worker`, then `deployment`.
"""
