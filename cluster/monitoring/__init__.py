"""What is measured: metrics, traces, service levels."""
