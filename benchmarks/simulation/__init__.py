"""A discrete-event simulator of jobs that share a data set: samplers x cache policies x capacities.

`workload` says who reads what, when and how fast; `schedule` turns it into events; `engine` lets a sampler
and a cache answer them; `bounds` says what nobody could exceed; `uniformity` and `dependence` judge the
orders. The command line is `python -m benchmarks.simulate`.
"""
