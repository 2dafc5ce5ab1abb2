"""Whether requests wait as long as a replica takes to start that they order. Pure, from the config."""

from __future__ import annotations

from collections.abc import Iterator

from cluster.config.root import Config
from cluster.launch.fit import Finding

# From a request's coming to Serve's controller, which decides, and back to the ingress, beside upscale_delay_s.
_TOLD_S = 5.0


def start_wait_findings(config: Config) -> Iterator[Finding]:
    """Warnings: all of it works where starts are quicker than the config says."""
    ingress, pools = config.ingress, config.pools
    for name, pool in pools.deployed().items():
        scaling = pool.autoscaling
        if scaling is None or pool.most_replicas == pool.first_replicas == scaling.min_replicas:
            continue
        key, start_s = f"pools.{name}.autoscaling", scaling.expected_start_s
        guess = f"{key}.expected_start_s {start_s:g}"
        if ingress.cold_start_timeout_s < start_s:
            yield _warning(
                f"ingress.cold_start_timeout_s: {ingress.cold_start_timeout_s:g} s is less than a start takes "
                f"({guess}): who waits for a replica is refused before it is there; expected twice as long as a start"
            )
        may_grow = scaling.max_replicas > max(1, scaling.min_replicas)
        ordered_s = scaling.upscale_delay_s if may_grow else 0.0
        if ingress.request_timeout_s < ordered_s + start_s:
            yield _warning(
                f"ingress.request_timeout_s: {ingress.request_timeout_s:g} s is over before a replica can be there "
                f"({key}.upscale_delay_s {scaling.upscale_delay_s:g}, {guess}); give more"
            )
        if name == "decode" and may_grow and ingress.queue_timeout_s < ordered_s + _TOLD_S:
            yield _warning(
                f"ingress.queue_timeout_s: {ingress.queue_timeout_s:g} s is over before the replicas are ordered that "
                f"would be waited for ({key}.upscale_delay_s {ordered_s:g}, and {_TOLD_S:g} s until that is known): "
                "bursts end with 429; expected more than that, or a shorter upscale_delay_s"
            )


def _warning(text: str) -> Finding:
    return Finding(text, is_error=False)
