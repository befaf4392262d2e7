"""Published claims tested again: plans, measures, verdicts and pages.

It may import `reports` and the folders below.
"""
