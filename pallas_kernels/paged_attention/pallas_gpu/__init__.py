"""Paged attention on Hopper GPUs: Pallas, compiled by Mosaic GPU."""
