"""Products with stored weights on Hopper GPUs: Pallas, compiled by Mosaic GPU."""
