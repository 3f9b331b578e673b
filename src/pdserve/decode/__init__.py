"""What a decode worker decides: it owns each request from `Generate` to its one ending.

Owns: where a prompt is prefilled, and where after a failure; where an answer that was begun elsewhere goes on; stop
conditions, the text that goes out.
Must not know: sockets, clocks, torch, and the prefill role.
Start with `role`, then `request`.
"""
