"""What happened to a request and when: named instants, and the metrics that are differences of two of them.

Must not know who records an instant or why: the parts above name what they saw and give the time.
Start reading at `instants.py`, then `docs/metrics.md`.
"""
