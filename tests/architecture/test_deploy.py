"""What the files under deploy/ say is what the program knows."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from colibri.server.app import ALIASES, PATHS
from colibri.settings import Settings, flag_of, variable_of
from tests.architecture.sources import ROOT

DEPLOY = ROOT / "deploy"


def test_variables_and_flags_are_known() -> None:
    known = {variable_of(name) for name in Settings.names()}
    flags = {flag_of(name) for name in Settings.names_for("serve")}
    for path in DEPLOY.iterdir():
        text = path.read_text(encoding="utf-8")
        assert set(re.findall(r"COLIBRI_[A-Z_]+", text)) <= known, path
        if path.suffix == ".yaml":
            assert set(re.findall(r'"(--[a-z-]+)"', text)) <= flags, path


def test_every_path_is_in_the_documentation() -> None:
    text = (ROOT / "docs" / "SERVER.md").read_text(encoding="utf-8")
    for path in (each.path for each in PATHS):
        assert f"`{path.replace('{name:path}', 'NAME')}`" in text or f" {path}`" in text, path


def kubernetes() -> list[Any]:
    return list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text(encoding="utf-8")))


def containers() -> Iterator[Any]:
    for resource in kubernetes():
        spec = resource["spec"]
        yield from spec.get("template", {}).get("spec", spec)["containers"]


def test_resources_of_kubernetes() -> None:
    kinds = {(resource["apiVersion"], resource["kind"]) for resource in kubernetes()}
    assert kinds == {("apps/v1", "Deployment"), ("serving.kserve.io/v1alpha1", "ServingRuntime")}
    assert "/openai" in ALIASES  # which KServe puts before the paths of the API
    paths = {path.path for path in PATHS}
    for container in containers():
        assert container["args"][0] == "serve"
        assert container["resources"]["limits"]["memory"]  # by which the plan is made
        assert container["ports"][0]["containerPort"] == Settings().port
        for kind in ("readinessProbe", "livenessProbe", "startupProbe"):
            probe = container.get(kind, {})
            assert probe.get("httpGet", {"path": "/health"})["path"] in paths
            mounts = {mount["name"] for mount in container.get("volumeMounts", ())}
    pod = kubernetes()[0]["spec"]["template"]["spec"]
    assert mounts <= {volume["name"] for volume in pod["volumes"]}
    assert pod["securityContext"]["runAsNonRoot"] is True


def test_services_of_compose() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
    (service,) = compose["services"].values()
    assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
    assert service["ports"] == [f"127.0.0.1:{Settings().port}:{Settings().port}"]
    named = {volume.split(":")[0] for volume in service["volumes"] if volume[0] not in "$./"}
    assert named == set(compose["volumes"])
    assert service["mem_limit"]


def instructions() -> list[tuple[str, str]]:
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    lines = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ").splitlines()
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in lines if line.strip()]


def test_the_image_is_small_unprivileged_and_watched() -> None:
    found = instructions()
    names = [name for name, _ in found]
    known = {"FROM", "RUN", "WORKDIR", "COPY", "USER", "ENV", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT",
             "CMD"}  # fmt: skip
    assert set(names) <= known
    last = len(names) - 1 - names[::-1].index("FROM")
    assert names.count("FROM") == 2  # the compiler stays behind
    assert not any("build-essential" in text for _, text in found[last:])
    user = next(text for name, text in found[last:] if name == "USER")
    assert user not in ("root", "0")
    assert any("/health" in text for name, text in found if name == "HEALTHCHECK")
    sources = [word for name, text in found[:last] if name == "COPY" for word in text.split()[:-1]]
    assert all((ROOT / source).exists() for source in sources)
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    read = re.findall(r"(?:readme|license-files) = \W*([\w.]+)", project)
    assert set(read) | {"pyproject.toml", "meson.build", "src", "native"} == set(sources)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    text = (DEPLOY / "colibri.service").read_text(encoding="utf-8")
    unit = tmp_path / "colibri.service"
    unit.write_text(text.replace("/opt/colibri/bin/coli", "/bin/true"), encoding="utf-8")
    told = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False
    )
    assert (told.returncode, told.stderr) == (0, "")
