"""The shipped schedulers and router policies on a simulated clock: no engine, no Ray, no model."""
