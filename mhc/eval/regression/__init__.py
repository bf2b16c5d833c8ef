"""Compare a checkpoint's logits with stored ones."""
