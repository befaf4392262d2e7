"""A finished or running run on paper.

The report, its plots, the model card and the export of a policy. It may import `training` and the
folders below.
"""
