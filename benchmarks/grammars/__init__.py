"""What schemas and grammars cost: steps, first tokens, and what others feel of hostile ones."""
