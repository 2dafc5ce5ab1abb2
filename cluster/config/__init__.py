"""The config file: sections, what contradicts what, messages that name the key."""
