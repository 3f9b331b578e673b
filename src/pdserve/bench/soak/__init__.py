"""`pdserve soak`: mixed load and random faults for minutes on end, with memory, descriptors and ledgers watched.

Owns the load mix, what an answer must be, the plan of faults, the samples and the verdict on them. Must not know how
processes are started and signalled: that is `bench.faults`. Start reading at `soak`; `verdict` says what passes.
"""
