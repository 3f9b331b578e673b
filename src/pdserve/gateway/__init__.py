"""The OpenAI API in front of a cluster: checks and tokenizes requests, picks workers, passes tokens on, retries losses.

Must not know pages, handoffs or the fabric: a decode worker owns a request once it was dispatched.
Start reading at `dispatcher.py` (what is decided, sans-IO), then `hub.py` (sockets around it), then `app.py`.
"""
