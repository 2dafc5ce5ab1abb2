"""From the config's admission section to the scheduler's policy."""

from __future__ import annotations

from cluster.config.pool import AdmissionConfig
from scheduler.admission import AdmissionPolicy


def admission_policy(admission: AdmissionConfig) -> AdmissionPolicy:
    """What a decode scheduler is told. Pure."""
    return AdmissionPolicy(
        quantile=admission.quantile if admission.output_length == "quantile" else None,
        watermark_fraction=admission.watermark_fraction,
        max_overtakes=admission.max_overtakes,
    )
