"""Paged attention on TPUs: Pallas, compiled by Mosaic TPU."""
