"""Devices, checkpoints, run directories and the training loop.

Knows nothing of decoding or metrics: validation is passed in.
"""
