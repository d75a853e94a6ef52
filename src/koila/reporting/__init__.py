"""The last stage: what happened, in a form that people read.

Takes: counters, metrics and events of the other stages, and the plan.
Gives: metrics, reports, progress bars and plots.
"""
