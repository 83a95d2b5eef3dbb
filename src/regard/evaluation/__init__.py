"""Numbers to trust: metrics, the scores of a run on a split, and training that is validated by them.

Knows nothing of terminals or servers.
"""
