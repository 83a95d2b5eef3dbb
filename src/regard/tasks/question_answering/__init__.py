"""Question answering: a question attends to its context; the answer is a span of it, or a word."""
