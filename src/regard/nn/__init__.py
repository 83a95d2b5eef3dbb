"""Parts with weights: layers, multi-head attention, the KV cache, Transformer and recurrent stacks, the loss.

Ordinary torch modules. Knows nothing of what a model is used for.
"""
