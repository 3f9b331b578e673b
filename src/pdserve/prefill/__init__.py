"""What a prefill worker decides: admit or refuse a grant, arm before each pass, free pages when nothing reads them.

Owns: the sequences of handoffs and their pages. Must not know: sockets, clocks, torch, and the decode role.
Start with `role`.
"""
