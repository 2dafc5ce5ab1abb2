"""From logits to tokens and to what is said of them."""
