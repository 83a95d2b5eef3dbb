"""Tasks that read images: captions and classes."""
