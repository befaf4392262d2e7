"""Environments of other libraries, one file for each library, which loads it when needed."""
