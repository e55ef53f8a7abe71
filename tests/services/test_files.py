"""Checks the files under deploy/ with their own tools, without a cluster or a network."""

import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
#: The first one has resource.k8s.io/v1, with which a sidecar claims its GPU.
VERSIONS = ("1.34", "1.35", "1.36", "1.37")
#: Debian packages are not pinned; the tag pins the base image.
IGNORED = {DEPLOY / "vllm-omni" / "Dockerfile": ("DL3008", "DL3066")}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.stem)
def test_a_manifest_has_kubernetes_own_schema(path: Path, version: str) -> None:
    documents = list(yaml.safe_load_all(path.read_text()))
    assert documents
    for document in documents:
        assert kubernetes_validate.validate(document, version, strict=True) == version


@pytest.mark.parametrize("path", [DEPLOY / "Dockerfile", *IGNORED], ids=lambda p: p.parent.name)
def test_a_linter_has_nothing_to_say_of_a_dockerfile(path: Path) -> None:
    ignored = [word for rule in IGNORED.get(path, ()) for word in ("--ignore", rule)]
    linter = Path(sys.executable).parent / "hadolint"
    done = subprocess.run([linter, *ignored, path], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
