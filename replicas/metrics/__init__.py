"""What an engine reports."""
