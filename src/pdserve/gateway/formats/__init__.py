"""How models write calls of tools and reasoning: reading them from an answer's text, and grammars that force calls.

Must not know requests, answers or workers: text and pieces alone.
Start reading at `markers.py` and `json_call.py`, which the formats share, then `hermes.py`.
"""
