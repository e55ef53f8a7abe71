"""The report of `swapd plan --vllm`, and its page for people."""

from collections.abc import Callable, Iterator

import msgspec
from rich.console import Group, RenderableType
from rich.text import Text

from swapd.cli.common import columns, if_any
from swapd.plan import claims
from swapd.plan.demands import READ_BYTES_PER_S, StreamPoint
from swapd.plan.shares import GpuPlan, GpuShare, LargerCaches
from swapd.shared.text import plain
from swapd.shared.units import rate, seconds, size


class VllmPlanReport(msgspec.Struct, frozen=True):
    """The output of `swapd plan --vllm --json`."""

    gpus: tuple[GpuPlan, ...]
    bytes_per_s: float
    bandwidth_from: str
    #: For weights, and at most the whole KV caches.
    host_bytes: int
    chunk_bytes: int
    chunk_from: str
    settings: dict[int, dict[str, float]]
    overlay: str
    serve: tuple[str, ...]
    notes: tuple[str, ...]


def page(report: VllmPlanReport) -> RenderableType:
    parts: list[RenderableType] = []
    for plan in report.gpus:
        parts += [Text(_sum(plan)), "", columns(_STAGES, plan.shares, left=("stage",)), ""]
        parts += [Text(_budget(plan))] if plan.largest else []
        parts += [Text(_turns(plan))]
        parts += [Text(plain(_trade(plan, plan.larger)))] if plan.larger else []
        for each in streaming(plan):
            parts += ["", each]
        parts.append("")
    parts.append(Text(f"copies at {rate(report.bytes_per_s)}: {report.bandwidth_from}"))
    parts.append(Text(f"memory in chunks of {size(report.chunk_bytes)}: {report.chunk_from}"))
    copies = size(report.host_bytes)
    parts.append(Text(f"host memory for copies of weights and KV caches: {copies}"))
    parts += [Text(plain(note), "yellow") for note in report.notes]
    for title, text in (
        ("the daemon, first", "\n".join(report.serve)),
        ("the deploy file; --overlay prints it alone", report.overlay),
    ):
        parts += ["", Text(f"# {title}", "dim"), Text(text.rstrip())]
    return Group(*parts)


def _sum(plan: GpuPlan) -> str:
    if not any(s.ours for s in plan.shares):
        names = ", ".join(s.name for s in plan.shares)
        return f"GPU {plan.gpu}: {size(plan.total_bytes)}, for {names} as the file says"
    less = "".join(f" - {taken}" for taken in plan.beside)
    room = sum(s.room_bytes for s in plan.shares if s.ours)
    spare = f", {size(plan.left_bytes)} spare" if plan.left_bytes > 0 else ""
    return (
        f"GPU {plan.gpu}: {size(plan.total_bytes)}{less} - {size(room)} workspace leaves "
        f"{size(plan.budget_bytes)} for weights and KV caches, counted once{spare}"
    )


def _turns(plan: GpuPlan) -> str:
    weights = sum(s.weights_bytes for s in plan.shares if s.ours)
    caches = sum(s.cache_bytes for s in plan.shares)
    both = size(weights) + " of weights" + (f" and {size(caches)} of KV caches" if caches else "")
    if not plan.budget_bytes:
        return "no stage here uses swapd"
    if not plan.takes_turns:
        return f"{both} fit: no copies, and no waits"
    turning = plan.takes_turns
    who = f"the components of {turning[0]}" if len(turning) == 1 else ", ".join(turning)
    return (
        f"{who} take turns: {both}. A round that uses each once moves {size(plan.moved_bytes)} and "
        f"waits {seconds(plan.request_s)} for it; if stages left as wholes, "
        f"{size(plan.moved_whole_bytes)} and {seconds(plan.whole_s)}"
    )


def _trade(plan: GpuPlan, larger: LargerCaches) -> str:
    caches = " and ".join(f"{size(nbytes)} for {name}" for name, nbytes in larger.caches.items())
    rooms = {s.name: s.room_bytes for s in plan.shares}
    options = [claims.given_room(n, nbytes + rooms[n]) for n, nbytes in larger.caches.items()]
    return (
        f"larger KV caches hold more requests, and cost copies: with {caches} a round moves "
        f"{size(larger.moved_bytes)} and waits {seconds(larger.request_s)} ({' '.join(options)})"
    )


def _budget(plan: GpuPlan) -> str:
    weights, cache = plan.turn_bytes - plan.turn_cache_bytes, plan.turn_cache_bytes
    of = f" ({size(weights)} of weights and {size(cache)} of KV cache)" if cache else ""
    return (
        f"stays: {size(plan.stays_bytes)}. The largest turn is that of {plan.largest}: "
        f"{size(plan.turn_bytes)}{of}"
    )


def streaming(plan: GpuPlan) -> Iterator[RenderableType]:
    for name in dict.fromkeys(point.name for point in plan.streams):
        points = [point for point in plan.streams if point.name == name]
        yield Group(Text(plain(_streams(points[0]))), columns(_POINTS, points, left=("",)))


def _streams(point: StreamPoint) -> str:
    return (
        f"{point.name} does not fit: {point.streamed} of its {point.layers} layers stream, "
        f"{point.slots} at a time, and come in again at each step. It runs with enforce_eager: "
        "true. Tokens/s are an estimate, of one request: the slower of these copies and of a GPU "
        f"that reads its own memory at {rate(READ_BYTES_PER_S)}. To have more layers stream, for a "
        "larger KV cache, set resident in its additional_config.swapd:"
    )


_POINTS: dict[str, Callable[[StreamPoint], RenderableType]] = {
    "": lambda point: point.what,
    "resident": lambda point: (
        "auto" if point.what == "fastest" else f"{point.resident_bytes >> 20}MiB"
    ),
    "streams a step": lambda point: size(point.step_bytes),
    "tokens/s": lambda point: f"{1 / point.step_s:.1f}",
    "in its turn": lambda point: size(point.turn_bytes),
    "KV cache": lambda point: if_any(size, point.cache_bytes),
    "tokens": lambda point: if_any(str, point.cache_tokens),
}

_STAGES: dict[str, Callable[[GpuShare], RenderableType]] = {
    "stage": lambda share: Text(plain(share.name)),
    "weights": lambda share: if_any(size, share.weights_bytes),
    "KV cache": lambda share: if_any(size, share.cache_bytes),
    "tokens": lambda share: if_any(str, share.cache_tokens),
    "workspace": lambda share: size(share.room_bytes) + ("" if share.ours else ", with weights"),
    "all of it in": lambda share: if_any(seconds, share.swap_in_s),
}
