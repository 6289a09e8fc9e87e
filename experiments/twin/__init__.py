"""The scheduler on arrays: many worlds at once, and policies that are learnt in them."""
