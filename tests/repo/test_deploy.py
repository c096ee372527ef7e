# SPDX-License-Identifier: Apache-2.0
"""The image and the Helm values in ``deploy``. Files are parsed and compared with the project; no image is built."""

from __future__ import annotations

import tomllib
from fnmatch import fnmatch
from io import BytesIO
from typing import Any

import yaml
from dockerfile_parse import DockerfileParser

from tests.repo.tree import ROOT, files, read

DOCKERFILE = "deploy/Dockerfile"
VALUES = "deploy/production-stack.yaml"


def parsed(text: str) -> DockerfileParser:
    """Return the parsed text of a Dockerfile."""
    parser = DockerfileParser(fileobj=BytesIO())
    parser.content = text
    return parser


def instructions(name: str) -> list[str]:
    """Return the values of all instructions ``name`` of the Dockerfile."""
    return [each["value"] for each in parsed(read(DOCKERFILE)).structure if each["instruction"] == name]


def copied() -> list[str]:
    """Return the files and folders of the checkout that the build copies."""
    return [source for value in instructions("COPY") if not value.startswith("--from") for source in value.split()[:-1]]


def pinned() -> str:
    """Return the version of vLLM that the extra ``cuda`` pins."""
    (pin,) = tomllib.loads(read("pyproject.toml"))["project"]["optional-dependencies"]["cuda"]
    return str(pin).removeprefix("vllm==")


def is_ignored(path: str) -> bool:
    """Return whether the ignore list excludes a file: the last pattern that matches it or a folder of it decides."""
    parts = path.split("/")
    prefixes = ["/".join(parts[: length + 1]) for length in range(len(parts))]
    ignored = False
    for line in read(f"{DOCKERFILE}.dockerignore").splitlines():
        pattern = line.removeprefix("!")
        if line and not line.startswith("#") and any(fnmatch(prefix, pattern) for prefix in prefixes):
            ignored = not line.startswith("!")
    return ignored


def model() -> dict[str, Any]:
    """Return the model of the Helm values."""
    (found,) = yaml.safe_load(read(VALUES))["servingEngineSpec"]["modelSpec"]
    assert isinstance(found, dict)
    return found


def test_image_has_the_pinned_vllm() -> None:
    """Catches an image with a vLLM for which this version was not tested, and one in which pip replaced vLLM."""
    parser = parsed(read(DOCKERFILE))
    assert parser.parent_images[-1] in (f"vllm/vllm-openai:v{pinned()}", "vllm/vllm-openai:v${VLLM_VERSION}")
    assert f"VLLM_VERSION={pinned()}" in instructions("ARG")
    assert any('"vllm==${VLLM_VERSION}"' in value for value in instructions("RUN"))
    assert instructions("ENTRYPOINT") == ['["vllm", "serve"]']


def test_image_gets_every_file_of_the_wheel() -> None:
    """Catches a wheel without dashboards or licence, and a COPY of a file that the ignore list or a rename removed."""
    sources = copied()
    assert {"LICENSE", "README.md", "observability", "pyproject.toml", "vllm_steer"} == set(sources)
    paths = {path.as_posix() for path in files()}
    for source in sources:
        below = [path for path in paths if path == source or path.startswith(f"{source}/")]
        assert below, source
        assert [path for path in below if is_ignored(path)] == []
    assert is_ignored("tests/conftest.py") and is_ignored("vllm_steer/__pycache__/x.pyc")


def test_helm_values_use_the_image_of_this_version() -> None:
    """Catches values whose tag is another version of vLLM than the image's."""
    assert model()["tag"] == pinned()
    assert f"-t vllm-steer:{pinned()} ." in read(DOCKERFILE)


def test_replicas_share_the_registry() -> None:
    """Catches several servers whose claim can be mounted by one of them only."""
    assert model()["replicaCount"] > 1
    assert model()["pvcAccessMode"] == ["ReadWriteMany"]


def test_source_archive_has_the_deployment_files() -> None:
    """Catches files that git ignores."""
    paths = {path.as_posix() for path in files()}
    assert {DOCKERFILE, f"{DOCKERFILE}.dockerignore", VALUES} <= paths
    assert (ROOT / DOCKERFILE).is_file()
