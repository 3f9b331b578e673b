"""What the machine is made of, which NICs and cores each device is given, and what looks wrong about it.

Knows nothing of libfabric, workers or requests: it reads sysfs (through `sysfs.py` alone) and decides. Start reading in
`machine.py` (what was found), then `distance.py`, `plan.py` (what is chosen) and `findings.py` (what looks wrong).
"""
