"""Text and tokens: tokenizers, streaming detokenization, and the outputs that a user gets. Knows no
engine.
"""
