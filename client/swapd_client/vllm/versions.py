"""Supported versions of vLLM and vllm-omni.

The worker classes override methods that other versions may call in another order;
`tests/vllm/method_table.py` lists them. Imports neither package.
"""

import sys

from swapd_client.errors import SwapdError

#: Supported minor versions by package. vllm-omni needs vLLM of its own minor version.
SUPPORTED = {"vllm": ("0.30", "0.31", "0.32", "0.33"), "vllm_omni": ("0.30",)}


class UnsupportedVersion(SwapdError, RuntimeError):
    """The worker classes do not support this version of vLLM or vllm-omni."""


def check() -> None:
    """Raise UnsupportedVersion if a loaded package is not supported, or the two do not match.

    Reads the version from the package, because builds of vLLM have other distribution names.
    """
    vllm, omni = _loaded("vllm"), _loaded("vllm_omni")
    for package, version in (("vllm", vllm), ("vllm_omni", omni)):
        if version is not None and _minor(version) not in SUPPORTED[package]:
            name, minors = package.replace("_", "-"), SUPPORTED[package]
            raise UnsupportedVersion(
                f"swapd's worker classes are for {name} {_or(minors)}, and this is {version}: "
                f"install {name} {minors[-1]}.x, or a swapd that supports {version}; or take "
                "swapd_client's worker classes out of the stages' configuration"
            )
    if vllm is not None and omni is not None and _minor(vllm) != _minor(omni):
        raise UnsupportedVersion(
            f"vllm-omni {omni} goes with vllm {_minor(omni)}.x, and this is vllm {vllm}: "
            f"install vllm {_minor(omni)}.x; or uninstall vllm-omni, and use vllm alone"
        )


def _loaded(package: str) -> str | None:
    return getattr(sys.modules.get(package), "__version__", None)


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _or(minors: tuple[str, ...]) -> str:
    *first, last = (f"{minor}.x" for minor in minors)
    return f"{', '.join(first)} or {last}" if first else last
