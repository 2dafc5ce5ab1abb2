"""What is refused, how fast, and what others feel of it: bad, huge and hostile bodies against a real server."""
