"""From files or generators to batches: readers by format, the ledger, vocabularies, padding and batching.

Knows nothing of models: what a task makes of an example is passed in, or done in `tasks/`.
"""
