"""A run as a picture: memory over time, the queue, and how latencies are spread."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from cluster.simulation.client import ClientStatus
from cluster.simulation.simulated_system import SystemRun
from cluster.user_error import UserError


def check_can_plot() -> None:
    """Raises UserError when matplotlib is not installed: better before a long run than after it."""
    if find_spec("matplotlib") is None:
        raise UserError("--plot needs matplotlib: pip install 'splitserve[plot]', or leave --plot out (see --json)")


def plot_run(run: SystemRun, path: Path) -> None:
    """Write an image; its format is that of the file's suffix. Raises UserError."""
    check_can_plot()
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (memory, queue, latency) = plt.subplots(3, 1, figsize=(9, 9), constrained_layout=True)
    times_s = [sample.time_s for sample in run.samples]
    memory.plot(times_s, [100 * sample.decode_mean for sample in run.samples], label="decode, mean of replicas")
    memory.plot(times_s, [100 * sample.decode_max for sample in run.samples], label="decode, fullest replica")
    memory.plot(times_s, [100 * sample.prefill_mean for sample in run.samples], label="prefill, mean")
    memory.set(ylabel="KV blocks in use, %", xlabel="simulated s", ylim=(0, 105))
    memory.legend(loc="upper left", fontsize="small")
    queue.plot(times_s, [sample.num_running for sample in run.samples], label="running on decode")
    queue.plot(times_s, [sample.num_queued for sample in run.samples], label="queued on decode")
    queue.set(ylabel="requests", xlabel="simulated s")
    queue.legend(loc="upper left", fontsize="small")
    finished = [client for client in run.clients if client.status is ClientStatus.FINISHED]
    for name, values_s in {
        "TTFT": sorted(client.ttft_s for client in finished),
        "TPOT": sorted(value for client in finished if (value := client.tpot_s) is not None),
    }.items():
        shares = [100 * (index + 1) / len(values_s) for index in range(len(values_s))]
        latency.plot([1000 * value_s for value_s in values_s], shares, label=name)
    latency.set(xscale="log", xlabel="ms", ylabel="% of requests at most")
    latency.grid(alpha=0.3)
    latency.legend(loc="lower right", fontsize="small")
    try:
        figure.savefig(path, dpi=90)
    except (OSError, ValueError) as error:
        raise UserError(f"--plot {path}: {error}") from error
    finally:
        plt.close(figure)
