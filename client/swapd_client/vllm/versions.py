"""Which versions of vLLM and vllm-omni the worker classes were made for.

They override methods of worker classes, which other versions may call in another order; `calls.py`
lists those methods. Imports neither: both are loaded already wherever it matters.
"""

import sys

from swapd_client.errors import SwapdError

#: By package, the minor versions that are supported. vllm-omni goes with vLLM of its own minor.
SUPPORTED = {"vllm": ("0.30", "0.31", "0.32"), "vllm_omni": ("0.30",)}


class UnsupportedVersion(SwapdError, RuntimeError):
    """This vLLM or vllm-omni is another than the worker classes were made for."""


def check() -> None:
    """Raise UnsupportedVersion if one that is loaded here is not supported, or both do not match.

    Asked of the packages themselves: builds of vLLM have other names as distributions.
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
