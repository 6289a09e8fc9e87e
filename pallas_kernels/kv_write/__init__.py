"""Writing new keys and values into the pages of a cache."""
