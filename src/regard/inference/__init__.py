"""A trained run as a function: constraints, beam search, sampling, the predictor and its engines.

Knows nothing of how a run was trained or scored.
"""
