"""Encoders of images: from scratch, and pretrained backbones with their weights."""
