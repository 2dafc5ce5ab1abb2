"""A model's answer taken apart: what it thought, what it says, and which tools it calls.

Begin with `answer_splitter.py`. Families of models differ in data alone: `format_table.py`.
"""
