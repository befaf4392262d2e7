"""Haystack: the film, the environment, and searches to compare with, T* among them."""
