"""What is measured: metrics, traces, service levels.

Begin with `metric_table.py`, which lists every metric.
"""
