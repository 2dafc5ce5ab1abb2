"""The config file: sections, what contradicts what, messages that name the key.

Begin with `root.py`; `file.py` reads one.
"""
