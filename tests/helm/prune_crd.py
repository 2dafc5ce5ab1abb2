"""Makes rayservice_schema.json, a JSON Schema of what the chart uses of KubeRay's RayService.

Origin: ray.io_rayservices.yaml of KubeRay v1.7.0 (ray-project/kuberay, Apache-2.0), version v1, without what Kubernetes
fills in and without pod templates, which are checked as pods. `python -m tests.helm.prune_crd CRD` writes it again.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml

SCHEMA = Path(__file__).parent / "rayservice_schema.json"
# Checked elsewhere (template), written by the operator (status), or behind a feature gate that is off.
_LEFT_OUT = {"template", "status", "headService", "networkPolicy", "historyServerOptions", "tlsOptions", "metadata"}
_KEPT = ("type", "enum", "pattern", "minimum", "maximum", "anyOf")


def pruned(crd: dict[str, Any]) -> dict[str, Any]:
    """JSON Schema of a RayService. Unknown fields are errors, as `kubectl --validate=strict` has it."""
    (version,) = (found for found in crd["spec"]["versions"] if found["name"] == "v1")
    return {
        "description": str(__doc__).split("\n\n")[1].replace("\n", " "),
        **_convert(version["schema"]["openAPIV3Schema"]),
    }


def _convert(schema: dict[str, Any]) -> dict[str, Any]:
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    result: dict[str, Any] = {key: schema[key] for key in _KEPT if key in schema}
    if "items" in schema:
        result["items"] = _convert(schema["items"])
    extra = schema.get("additionalProperties")
    if isinstance(extra, dict):
        result["additionalProperties"] = _convert(extra)
    properties: dict[str, Any] = schema.get("properties", {})
    if properties:
        result["properties"] = {name: {} if name in _LEFT_OUT else _convert(p) for name, p in properties.items()}
        result["additionalProperties"] = False
    # The API server fills defaults in before it asks what is missing.
    required = [name for name in schema.get("required", []) if "default" not in properties.get(name, {})]
    return result | ({"required": required} if required else {})


if __name__ == "__main__":
    SCHEMA.write_text(json.dumps(pruned(yaml.safe_load(Path(sys.argv[1]).read_text())), indent=1) + "\n")
