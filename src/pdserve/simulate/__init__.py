"""A world that runs the product's code on a virtual clock, from one seed, and breaks it on purpose.

Owns: the event queue, control connections that are delayed and cut, workers and a gateway without processes, a model
whose KV is known in advance, the plan of faults, and the referee that checks the rules after each event.

Must not know: sockets, asyncio, threads, torch, the system's clock. Start reading at `world`; `docs/simulator.md` says
what is modelled and what is not.
"""
