"""RAGEN: train LLM agents with multi-turn reinforcement learning, and see why training works."""
