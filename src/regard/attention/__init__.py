"""The equation `normalize(score(query, keys), mask) @ values` without weights: scores, masks, normalizers, positions.

Plain functions of tensors. Knows nothing of modules, batches or tasks.
"""
