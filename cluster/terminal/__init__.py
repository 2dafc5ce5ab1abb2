"""What a person sees in a terminal: steps as they go on, and of the log what concerns people; the rest is in a file."""
