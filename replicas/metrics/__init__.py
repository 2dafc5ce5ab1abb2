"""What an engine reports of itself."""
