"""The experiment on two cores: two colocated workers against one prefill and one decode worker, at equal load.

Owns its points and arms, the order of its runs, the rules that make a run void, its book of results and their
statistics. Must not know how a load is sent or how a deployment starts, beyond calling them. Start reading at `points`,
then `campaign`; `benchmarks/two_cores.py` is its command.
"""
