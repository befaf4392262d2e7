"""The engine: the loop's one view of the machine, and how its parts are made.

The protocol, the local engine, sharded learners, and models made from a config. It may import
`learning`, `sampling` and the folders below.
"""
