"""What every benchmark shares: counting bytes, taking turns, judging a ratio, keeping the result."""
