"""Other people's formats: Hugging Face directories in and out, GGUF in, CTranslate2 out.

The only room beside `tasks/` that may ask for a model's architecture.
"""
