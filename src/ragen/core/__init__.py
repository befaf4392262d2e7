"""Foundations that every other folder uses and that use nothing of RAGEN.

The records, errors, metrics, seeds, statistics, tables and the handling of stop signals. It may
import no other folder and loads no torch.
"""
