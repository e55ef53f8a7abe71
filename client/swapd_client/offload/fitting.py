"""Tells which calls of an attached model would be refused, as what they need never fits."""

from collections.abc import Mapping, Sequence

from swapd_client.errors import SwapdError, TooLarge
from swapd_client.log import log
from swapd_client.offload.holdables import AttachedComponent, PassHold
from swapd_client.offload.lender import AttachClient


def refuse_what_never_fits(
    client: AttachClient, components: Mapping[str, AttachedComponent], staying: Sequence[str]
) -> None:
    """Raise TooLarge for a component whose first call would be refused; warn if later ones may be.

    `staying`: names in the daemon of components that are never evicted.
    """
    for one in components.values():
        needed = _needed(client, one)
        if len(needed) > 1 and (refused := _refused(client, needed)) is not None:
            raise TooLarge(f"{refused}. {_advice(one, needed)}") from refused
        _warn_of_permanent(client, one, needed, staying)
        modules = set(one.module.modules()) - {one.module}
        for inner in [other for other in components.values() if other.module in modules]:
            both = dict.fromkeys([*needed, *_needed(client, inner)])
            if (refused := _refused(client, list(both))) is not None:
                log.warning(
                    "%r is in %r, and a call that comes from there will be refused, as it needs "
                    "both on the device: %s. Attach the outer one alone, or stream it",
                    inner.name,
                    one.name,
                    refused,
                )


def _warn_of_permanent(
    client: AttachClient, one: AttachedComponent, needed: Sequence[str], staying: Sequence[str]
) -> None:
    beside = [name for name in staying if name not in needed]
    if needed and beside and (refused := _refused(client, [*needed, *beside])) is not None:
        log.warning(
            "with the permanent components on the device (%s), a call of %r will be refused: %s",
            ", ".join(beside),
            one.name,
            refused,
        )


def _needed(client: AttachClient, one: AttachedComponent) -> list[str]:
    names = list(one.all_of_it.names)
    if not isinstance(one.held, PassHold):
        return names
    stream = one.held.stream
    largest = max(stream.parts, key=lambda part: client.session.own(part).nbytes)
    return [name for name in names if name not in stream.parts or name == largest]


def _refused(client: AttachClient, names: Sequence[str]) -> TooLarge | None:
    try:
        client.forecast(*names)
    except TooLarge as exc:
        return exc
    except SwapdError:  # the acquire will raise it
        pass
    return None


def _advice(one: AttachedComponent, needed: Sequence[str]) -> str:
    if isinstance(one.held, PassHold):
        return (
            f"{one.name!r} is streamed, and needs one block and all tensors outside the blocks at "
            "once: name more, or smaller ones, in blocks="
        )
    return (
        f"{one.name!r} is made of {', '.join(needed)}, which it needs at once: tensors that others "
        "use too, and later ones, are components of their own. detach() and attach() again to "
        "join later tensors; attach components that share tensors as one"
    )
