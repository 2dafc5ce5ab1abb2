"""Rules of token choice, one a file: each changes logits before a token is chosen. `rule_order` lists them."""
