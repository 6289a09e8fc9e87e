"""Training: a small model that one engine serves while it is trained."""
