"""How each command of the documents is tried by tests, and why not more: the first row that fits it holds."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from tests.docs.command_blocks import Command


class Trial(Enum):
    RUN = "run as it stands, in a folder like a clone; it must succeed"
    OPTIONS = "its own help knows every option, and the files it names are there"
    MAKE = "make says what it would do; the targets, variables, files and marks it names are there"
    CHART = "the chart is rendered with the values it gives"
    SERVER = "run against a server (tests/server/test_docs_on_server.py); here that its options or its path are there"
    NAMED = "the files it names are there, no more"


@dataclass(frozen=True, slots=True)
class Row:
    """pattern: of a whole command, as a regular expression. why: it is not run."""

    pattern: str
    trial: Trial
    why: str = ""


TABLE = (
    Row(r"splitserve check (configs/\S+|MODEL)", Trial.RUN),
    Row(r"splitserve deploy .*", Trial.RUN),
    Row(r"splitserve simulate .*", Trial.RUN),
    Row(r"python -m benchmarks\.simulation --trace benchmarks/\S+ admission", Trial.RUN),
    Row(r"splitserve (chat|bench)( .*)?", Trial.OPTIONS, "their own tests run them against a server"),
    Row(r"splitserve serve .*", Trial.OPTIONS, "runs until it is stopped; tests/server starts servers"),
    Row(r"splitserve check serve\.yaml", Trial.OPTIONS, "of a file that the command before it makes with Helm"),
    Row(r"splitserve fit-steps .*", Trial.OPTIONS, "of recorded steps; tests/simulation/test_step_fit.py makes some"),
    Row(r"python -m benchmarks\.gpu\.\S+ ?.*", Trial.OPTIONS, "needs a GPU, most of them a vLLM or a model too"),
    Row(r"python -m benchmarks\.simulation .*", Trial.OPTIONS, "minutes, and public traces that are not here"),
    Row(r"python -m benchmarks\.simulation_check .*", Trial.OPTIONS, "eight minutes against a server of its own"),
    Row(r"python -m benchmarks\.grammars.*", Trial.OPTIONS, "15 minutes, with a server of its own"),
    Row(r"python -m tests\.simulated_cluster\.replay .*", Trial.OPTIONS, "tests/simulated_cluster runs the same seeds"),
    Row(r"python -m benchmarks\.load .*", Trial.SERVER),
    Row(r"curl .*", Trial.SERVER),
    Row(r"make .*", Trial.MAKE, "installs, serves, or takes minutes; .ci/run has setup, lint and test"),
    Row(r"helm (install|template) .*", Trial.CHART, "no cluster here"),
    Row(r"kubectl .*", Trial.NAMED, "no cluster here"),
    Row(r"yq .*", Trial.NAMED, "takes one value out of what Helm printed; tests/helm does so in Python"),
    Row(r"docker .*", Trial.NAMED, "no Docker here; tests/helm/test_dockerfile.py reads the Dockerfile"),
    Row(r"apt-get install prometheus", Trial.NAMED, "changes the machine; .ci/run does it"),
    Row(r"prometheus .*", Trial.NAMED, "runs until it is stopped; tests/monitoring checks its files by promtool"),
    Row(r"pip install .*", Trial.NAMED, "installs; tests/cluster/test_package_roots.py does it aside"),
    Row(r"serve deploy serve\.yaml", Trial.NAMED, "needs a cluster; tests/server/test_chart_on_ray.py deploys one"),
)

# Words in capitals stand for what a reader has: in the place of these there is something.
EXAMPLES = {"MODEL": "bundled"}


def row_of(command: Command) -> Row | None:
    return next((row for row in TABLE if re.fullmatch(row.pattern, command.text, re.DOTALL)), None)
