"""Every setting: frozen pydantic models, TOML in and out, and one place that turns validation errors into words.

Imports no torch. Knows nothing of data, models or runs beyond the names of their settings.
"""
