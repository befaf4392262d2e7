"""Language models.

Finding and loading them, fast paths for known architectures, precision and LoRA adapters. It may
import `envs` and the folders below. torch starts here.
"""
