"""RAGEN's own environments, one file for each."""
