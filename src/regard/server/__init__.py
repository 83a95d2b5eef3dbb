"""HTTP: application, batcher and middleware; regard's own API, LibreTranslate's and OpenAI's; `studio/` is the page.

Knows tasks only by what they say of their requests and answers.
"""
