"""Weights, and a step of the model on any device."""
