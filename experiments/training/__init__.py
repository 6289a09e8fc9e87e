"""Training a small model, to serve it while it learns."""
