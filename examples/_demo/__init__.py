"""The parts of the demo."""
