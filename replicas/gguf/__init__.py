"""A GGUF file made into what transformers loads: what it says, and what of it is refused."""
