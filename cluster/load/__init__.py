"""Workloads, recorded or made up, and the open-loop load generator of `splitserve bench` and of benchmarks/."""
