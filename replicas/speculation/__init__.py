"""Drafts: tokens that are guessed to follow, which a step of the model then proves right or wrong."""
