"""Measurements of pdserve against limits and peers: each takes both in one run, in alternation, several times.

Owns what is measured and how it is summed up. Must not know of argument parsing or of how a table looks: that is `cli`.
Start reading at `transfer`.
"""
