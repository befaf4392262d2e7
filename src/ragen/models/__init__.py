"""Where weights come from.

Names, the Hub, files and folders, loading, adapters on disk, and the plan of memory. It may import
`networks` and the folders below.
"""
