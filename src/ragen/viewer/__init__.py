"""`ragen view`: a web server and its pages over the databases of all runs.

It may import `serving` and the folders below and loads no torch.
"""
