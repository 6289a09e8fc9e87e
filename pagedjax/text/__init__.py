"""Text and tokens: tokenizers, streaming detokenization, and the outputs that a user gets. Knows no
engine.

structured/ is forms of answers as grammars; tools/ is calls of functions in answers.
"""
