"""CSV, JSONL and Parquet files as tables."""
