"""Whether a command of vLLM names swapd's classes, so that it cannot run without swapd."""

from pathlib import Path

from swapd.run.commands import DEPLOY_CONFIG, WORKER_CLS, Command, option

_OURS = "swapd_client."


def names_swapd(command: Command, directory: Path) -> str:
    """The option that does, with its value, as it is typed; "" if none does.

    `directory`: the command's own.
    """
    for name in (WORKER_CLS, DEPLOY_CONFIG):
        said = option(command.words, name) or ""
        if said.startswith(_OURS) or (
            name == DEPLOY_CONFIG and said and _is_ours(directory / said)
        ):
            return f"{name} {said}"
    return ""


def _is_ours(path: Path) -> bool:
    """Whether a deploy file names swapd's workers, itself; its base file is vllm-omni's."""
    try:
        return _OURS in path.read_text(errors="replace")
    except OSError:
        return False  # vllm-omni says so
