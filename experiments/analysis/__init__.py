"""Results for a reader: repeats folded into points, sentences, tables and plots.

Pure functions of summaries.
"""
