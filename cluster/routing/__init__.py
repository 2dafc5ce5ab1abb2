"""Which replica a request goes to, the attempts it takes, and the tokens on their way back."""
