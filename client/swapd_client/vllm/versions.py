"""Which versions of vLLM and vllm-omni the worker classes were made for.

They override methods of worker classes, which other versions may call in another order. Imports
neither: both are loaded already wherever it matters.
"""

import sys

from swapd_client.errors import SwapdError

#: By package, the versions that are supported: all that begin so.
SUPPORTED = {"vllm": "0.30.", "vllm_omni": "0.30."}


class UnsupportedVersion(SwapdError, RuntimeError):
    """This vLLM or vllm-omni is another than the worker classes were made for."""


def check() -> None:
    """Raise UnsupportedVersion if one that is loaded here is not supported.

    Asked of the packages themselves: builds of vLLM have other names as distributions.
    """
    for package, prefix in SUPPORTED.items():
        version = getattr(sys.modules.get(package), "__version__", None)
        if version is not None and not f"{version}.".startswith(prefix):
            raise UnsupportedVersion(
                f"swapd's worker classes are for {package} {prefix}x, and this is {version}: "
                f"install {package} {prefix}x, or a swapd that supports {version}; or take "
                "swapd_client's worker classes out of the stages' configuration"
            )
