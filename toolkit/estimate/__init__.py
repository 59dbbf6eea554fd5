"""What a run costs, calculated."""
