"""States in pages on TPUs."""
