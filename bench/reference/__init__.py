"""Keep the yardsticks of ``bench``: they are written plainly, and are never improved."""
