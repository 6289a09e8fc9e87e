"""Reading results: repeats folded into points, tables, plots."""
