"""Before anything starts: what the machine and the model are, what is chosen for them, and whether it fits.

Begin with `start.py`. What decides (`start_choice.py`, `fit.py`) is pure; the other files gather what it is told.
"""
