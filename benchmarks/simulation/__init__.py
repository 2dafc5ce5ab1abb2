"""What the simulator is asked: admission policies side by side, and many replicas."""
