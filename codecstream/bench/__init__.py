"""Qualify a device: does it decode in real time, with how much to spare, and for how long.

``codecstream-bench ARTIFACT`` measures in processes of its own, prints a table and a verdict, and
writes all figures as JSON, which ``docs/bench.md`` describes. numpy and the artifact's runtime
are all that it needs.
"""
