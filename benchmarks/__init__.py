"""Side-by-side measurements against peers, one script per claim (`make bench`)."""
