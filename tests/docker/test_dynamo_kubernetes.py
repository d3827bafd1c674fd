"""The graph deployment for Dynamo's operator: its objects pass their schemas and belong
together.

Schemas of custom resources are not ours to ship. KVLATHE_CRDS names a folder with them:
custom resource definitions (.yaml) of Dynamo's operator
(deploy/operator/config/crd/bases of ai-dynamo/dynamo), and KEDA's ScaledObject as a
JSON schema or a definition.
"""

from __future__ import annotations

import json
import os
import re
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from click.testing import CliRunner

from kvlathe.cli import main as cli

ROOT = Path(__file__).resolve().parents[2]
CUSTOM = ("DynamoGraphDeployment", "ScaledObject")
PORTS = {"http", "system"}
"""Names that Dynamo's operator gives the ports that it opens."""

Json = dict[str, Any]


@cache
def objects() -> list[Json]:
    text = (ROOT / "docker/dynamo.kubernetes.yaml").read_text("utf-8")
    return list(yaml.safe_load_all(text))


def of_kind(kind: str) -> Json:
    (found,) = [each for each in objects() if each["kind"] == kind]
    return found


def component(name: str) -> Json:
    parts = of_kind("DynamoGraphDeployment")["spec"]["components"]
    (found,) = [part for part in parts if part["name"] == name]
    return found


def pod_of(part: Json) -> tuple[Json, Json]:
    """Its pod, and the container that the operator runs."""
    pod = part["podTemplate"]["spec"]
    (container,) = pod["containers"]
    assert container["name"] == "main"
    return pod, container


@cache
def schemas(folder: Path) -> dict[str, Json]:
    """By ``kind``: of the version that our objects name."""
    versions = {each["kind"]: each["apiVersion"].split("/")[-1] for each in objects()}
    found: dict[str, Json] = {}
    for path in folder.glob("*.yaml"):
        spec = yaml.load(path.read_text("utf-8"), yaml.CSafeLoader)["spec"]
        kind = spec["names"]["kind"]
        for version in spec["versions"]:
            if version["name"] == versions.get(kind):
                found[kind] = version["schema"]["openAPIV3Schema"]
    for path in folder.glob("scaledobject*.json"):
        found["ScaledObject"] = json.loads(path.read_text("utf-8"))
    return found


def unknown(value: Any, schema: Json, where: str = "") -> list[str]:  # noqa: ANN401
    """Fields that the schema does not name: the API server would drop them."""
    if schema.get("x-kubernetes-preserve-unknown-fields"):
        return []
    if isinstance(value, list):
        items = schema.get("items", {})
        lost: list[str] = []
        for number, each in enumerate(value):
            lost += unknown(each, items, f"{where}[{number}]")
        return lost
    if not isinstance(value, dict) or schema.get("additionalProperties"):
        return []
    named = schema.get("properties")
    if named is None:
        return []
    lost = [f"{where}.{name}" for name in value if name not in named]
    for name in value.keys() & named.keys():
        lost += unknown(value[name], named[name], f"{where}.{name}")
    return lost


def failures(thing: Json, schema: Json) -> list[str]:
    """The fields that the API server would refuse or drop."""
    checked = jsonschema.Draft202012Validator(schema)
    refused = [error.message for error in checked.iter_errors(thing)]
    return refused + unknown(thing, schema)


@pytest.mark.parametrize("kind", CUSTOM)
def test_custom_resources_pass_their_schemas(kind: str) -> None:
    folder = os.environ.get("KVLATHE_CRDS")
    if not folder:
        pytest.skip("schemas of custom resources: KVLATHE_CRDS names no folder")
    schema = schemas(Path(folder))[kind]
    thing = of_kind(kind)
    assert failures(thing, schema) == []
    wrong = thing | {"spec": thing["spec"] | {"componentz": 2}}
    assert any("componentz" in failure for failure in failures(wrong, schema))


def test_plain_objects_and_pods_are_valid() -> None:
    validate = pytest.importorskip("kubernetes_validate")
    for thing in objects():
        if thing["kind"] not in CUSTOM:
            validate.validate(thing, "1.31", strict=True)
    for part in of_kind("DynamoGraphDeployment")["spec"]["components"]:
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}}
        validate.validate(pod | part["podTemplate"], "1.31", strict=True)


@pytest.mark.parametrize("name", ["Frontend", "Worker"])
def test_pods_have_limits_and_probes_and_no_rights(name: str) -> None:
    pod, container = pod_of(component(name))
    assert "memory" in container["resources"]["limits"]
    assert pod["securityContext"]["runAsNonRoot"]
    rights = container["securityContext"]
    assert rights["readOnlyRootFilesystem"] and rights["capabilities"]["drop"] == [
        "ALL"
    ]
    for probe in ("readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["port"] in PORTS
    claims = [v for v in pod["volumes"] if "persistentVolumeClaim" in v]
    (claim,) = [v["persistentVolumeClaim"]["claimName"] for v in claims]
    assert claim == of_kind("PersistentVolumeClaim")["metadata"]["name"]


def test_the_worker_is_started_as_its_command_takes_it() -> None:
    pod, container = pod_of(component("Worker"))
    program, command, _ = container["command"]
    assert (program, command) == ("kvlathe", "dynamo")
    shown = CliRunner().invoke(cli.cli, ["dynamo", "--help"]).output
    given = container["args"]
    for option in given[::2]:
        assert option in shown
    seconds = float(given[given.index("--drain-seconds") + 1])
    assert seconds < pod["terminationGracePeriodSeconds"]
    named = {each["name"] for each in container["env"]} | {"DYN_NAMESPACE"}
    assert set(re.findall(r"\$\((\w+)\)", " ".join(given))) <= named


def test_autoscaling_names_the_workers_of_the_dynamo_graph() -> None:
    graph = of_kind("DynamoGraphDeployment")["metadata"]["name"]
    scaled = of_kind("ScaledObject")["spec"]
    worker = component("Worker")
    assert "scalingAdapter" in worker
    name = f"{graph}-{worker['name'].lower()}"  # as the operator names the adapter
    assert scaled["scaleTargetRef"]["name"] == name
    assert scaled["minReplicaCount"] == worker["replicas"]
    support = (ROOT / "tests/support/dynamo_cluster.py").read_text("utf-8")
    first = scaled["triggers"][0]["metadata"]["query"]
    gauge = re.findall(r"dynamo_component_\w+", first)
    assert gauge and gauge[0] in support  # a real worker's, in tests/dynamo
    budget = of_kind("PodDisruptionBudget")["spec"]["selector"]["matchLabels"]
    assert graph in budget.values() and worker["type"] in budget.values()
