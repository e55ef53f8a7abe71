"""The device memory that a component needs at once, and advice if it can never fit.

Without this check a model would be attached, and its first call refused.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence

from swapd_client.errors import SwapdError, TooLarge
from swapd_client.offload.attachment import Attached
from swapd_client.offload.lender import Lender
from swapd_client.offload.scope import Passed

log = logging.getLogger("swapd_client")


def refuse_what_never_fits(
    client: Lender, components: Mapping[str, Attached], staying: Sequence[str]
) -> None:
    """Raise TooLarge for a component that no call could ever load; warn if that may happen later.

    `staying`: registered components that are never evicted, by their names in the daemon.
    """
    for one in components.values():
        needed = _needed(client, one)
        if len(needed) > 1 and (refused := _refused(client, needed)) is not None:
            raise TooLarge(f"{refused}. {_advice(one, needed)}") from refused
        beside = [name for name in staying if name not in needed]
        if needed and beside and (refused := _refused(client, [*needed, *beside])) is not None:
            log.warning(
                "with the permanent components on the device (%s), a call of %r will be refused: "
                "%s",
                ", ".join(beside),
                one.name,
                refused,
            )
        for inner in _inside(one, components.values()):
            both = dict.fromkeys([*needed, *_needed(client, inner)])
            if (refused := _refused(client, list(both))) is not None:
                log.warning(
                    "%r is in %r, and a call that comes from there will be refused, as it needs "
                    "both on the device: %s. Attach the outer one alone, or stream it",
                    inner.name,
                    one.name,
                    refused,
                )


def _needed(client: Lender, one: Attached) -> list[str]:
    """The names that a call of a component holds at once; if streamed, with the largest part."""
    names = list(one.all_of_it.names)
    if not isinstance(one.held, Passed):
        return names
    stream = one.held.stream
    largest = max(stream.parts, key=lambda part: client.session.own(part).nbytes)
    return [name for name in names if name not in stream.parts or name == largest]


def _refused(client: Lender, names: Sequence[str]) -> TooLarge | None:
    try:
        client.forecast(*names)
    except TooLarge as exc:
        return exc
    except SwapdError:  # the acquire will raise it
        pass
    return None


def _inside(one: Attached, others: Iterable[Attached]) -> list[Attached]:
    modules = set(one.module.modules()) - {one.module}
    return [other for other in others if other.module in modules]


def _advice(one: Attached, needed: Sequence[str]) -> str:
    if isinstance(one.held, Passed):
        return (
            f"{one.name!r} is streamed, and needs one block and all tensors outside the blocks at "
            "once: name more, or smaller ones, in blocks="
        )
    return (
        f"{one.name!r} is made of {', '.join(needed)}, which it needs at once: tensors that others "
        "use too, and later ones, are components of their own. detach() and attach() again to "
        "join later tensors; attach components that share tensors as one"
    )
