"""Readers of CSV, TSV, JSON lines, Parquet and Arrow files."""
