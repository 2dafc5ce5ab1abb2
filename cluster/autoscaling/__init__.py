"""How many replicas: what demand is reported, and the policy that Serve's controller runs."""
