"""Writes a deploy file of vLLM-Omni with changes to the settings of its stages."""

from collections.abc import Mapping
from typing import Any

from swapd.plan.deploy import INNER, Deploy, cuda_stages


def overlay(deploy: Deploy, changes: Mapping[int, Mapping[str, Any]], async_chunk: bool) -> str:
    """The text of the file with `changes` to its stages, and its base file by full path.

    A change is also made in a stage's own dictionaries and for CUDA, if these set the key: they
    override the rest.
    """
    import yaml

    whole, own = deploy.whole, {**deploy.own, "async_chunk": async_chunk}
    own["stages"] = _changed(own.get("stages"), whole.get("stages"), changes, everywhere=True)
    cuda = cuda_stages(whole)
    if changed := _changed(cuda_stages(own), cuda, changes, everywhere=False):
        platforms = {**(own.get("platforms") or {})}
        platforms["cuda"] = {**(platforms.get("cuda") or {}), "stages": changed}
        own["platforms"] = platforms
    text = yaml.safe_dump(own, sort_keys=False, default_flow_style=None, width=100)
    return str(text)


def _changed(
    mine: list[dict[str, Any]] | None,
    whole: list[dict[str, Any]] | None,
    changes: Mapping[int, Mapping[str, Any]],
    *,
    everywhere: bool,
) -> list[dict[str, Any]]:
    """A file's own stages with `changes`: `everywhere`, or only where `whole` says the same."""
    by_id = {s["stage_id"]: dict(s) for s in mine or ()}
    said = {s["stage_id"]: s for s in whole or ()}
    for number, values in changes.items():
        before = said.get(number, {})
        again = {k: v for k, v in values.items() if everywhere or k in before}
        for inner in INNER:
            of = before.get(inner)
            if isinstance(of, dict) and not of.keys().isdisjoint(values):
                again[inner] = {k: values.get(k, v) for k, v in of.items()}
        if again:
            by_id[number] = {"stage_id": number, **by_id.get(number, {}), **again}
    return [by_id[number] for number in sorted(by_id)]
