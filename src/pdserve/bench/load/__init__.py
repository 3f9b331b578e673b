"""The open-loop load generator: sends a workload to any OpenAI-compatible server and says what its users would feel.

Start reading at `run`; `result` is what `result.json` holds.
"""
