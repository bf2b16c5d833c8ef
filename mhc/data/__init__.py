"""Data: sources, tokenisers, packing, and the pipeline that turns them into batches."""
