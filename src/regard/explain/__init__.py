"""Looking inside: recorded attention maps, pictures of them, and vectors of texts, tokens and words.

Everything is observed from outside: no model knows that it is looked at.
"""
