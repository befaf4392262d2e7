"""The command line: the commands, their arguments, and what they print.

It may import every other folder and loads only what a command needs.
"""
