"""Why training works or collapses.

Signals of every step, information in thoughts, and the guard that acts on alarms. It may import
`engines` and the folders below.
"""
