"""Why training works or collapses.

The metrics of every step (a new one goes into `step_metrics`), information in thoughts, and the
guard that acts on alarms. It may import `engines` and the folders below.
"""
