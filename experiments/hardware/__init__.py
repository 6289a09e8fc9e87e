"""What runs on, or is compiled for, a GPU or a TPU."""
