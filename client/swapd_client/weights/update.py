"""New values for a clean component: fill a second host copy, then replace the first one by it.

All of it changes in one step, once everything is written. No torch: the layout knows the values and
their places.
"""

import os
from collections.abc import Callable, Mapping
from typing import Any

from swapd.shared import protocol
from swapd.shared.fds import OwnedFd
from swapd_client.errors import InvalidArgument, InvalidSource, SwapdError
from swapd_client.log import log
from swapd_client.memory import ranges
from swapd_client.memory.layout import through_mapping
from swapd_client.memory.part import Part
from swapd_client.memory.sources import extent_of
from swapd_client.session.disabled import Disabled
from swapd_client.session.registry import alone
from swapd_client.session.session import Call, Session

#: A component, and a function that writes new values at a given address of its bytes.
_Change = tuple[Part, Callable[[int], None]]


def together(session: Session, call: Call, values: Mapping[str, Mapping[str, Any]]) -> None:
    """Give several components or families new values, all in one step.

    Blocks for the copies. After an error nothing has changed. Raises as `_changes`, and the
    daemon's errors.
    """
    with session.life.changing():  # first: what has ended, or is another process's, has no parts
        asked = [one for name, named in values.items() for one in _changes(session, name, named)]
        with alone(session.life, [part for part, _ in asked]):
            _apply(session, call, asked)


def _apply(session: Session, call: Call, asked: list[_Change]) -> None:
    if isinstance(session, Disabled):  # no host copy, and no lease that keeps the old bytes
        for part, write in asked:
            session.edit(part, write)
        return
    begun: list[_PendingUpdate] = []
    try:
        for part, write in asked:
            begun.append(_PendingUpdate(part, session.next_id()))
            begun[-1].fill(session, call, write)
        if begun:
            first, *others = (update.part.name for update in begun)
            call(protocol.Commit(session.next_id(), first, tuple(others)))
        for update in begun:
            update.replace(session)
    except BaseException:
        for update in begun:
            update.give_up(session, call)
        raise


def _changes(session: Session, name: str, values: Mapping[str, Any]) -> list[_Change]:
    """Return the changes that `values` make to a component, or to a family's parts.

    Raises: InvalidSource for the first value that does not fit; UnknownComponent; InvalidArgument.
    """
    if not hasattr(values, "items"):
        raise InvalidArgument(
            f"{name!r} cannot be updated from a {type(values).__name__}: give a dict of tensors by "
            "name, such as a module's state_dict()"
        )
    ranges.refuse_unheld((key, *extent_of(value)) for key, value in values.items())
    family = session.registry.family(name)
    parts = [session.own(part) for part in family or [name]]
    if mutable := next((part.name for part in parts if part.mutable), None):
        raise InvalidArgument(
            f"{mutable!r} is mutable: write to its tensors under a lease, there is nothing to "
            "update"
        )
    grouped = _by_part(name, parts, values) if family else {name: values}
    by_name = {part.name: part for part in parts}
    return [(by_name[n], by_name[n].layout.writer(own)) for n, own in grouped.items() if own]


def _by_part(
    family: str, parts: list[Part], values: Mapping[str, Any]
) -> Mapping[str, Mapping[str, Any]]:
    """Return the values of each part, by their names there. Raises: InvalidSource."""
    grouped: dict[str, dict[str, Any]] = {}
    owners = _owners(family, parts)
    for key, value in values.items():
        found = owners.get(key, ())
        if len(found) != 1:
            which = f"in several: {', '.join(p.name for p, _ in found)}" if found else "in none"
            raise InvalidSource(
                f"{key!r} is {which} of the parts of {family!r}; nothing was changed"
            )
        part, inner = found[0]
        grouped.setdefault(part.name, {})[inner] = value
    return grouped


class _PendingUpdate:
    """An update that is requested, but not committed."""

    def __init__(self, part: Part, request: int) -> None:
        self.part = part
        self._request = request
        self._master: OwnedFd | None = None

    def fill(self, session: Session, call: Call, write: Callable[[int], None]) -> None:
        part = self.part
        call(protocol.Update(self._request, part.name))
        self._master = session.masters.take(self._request)[1]
        if part.nbytes:
            assert part.master is not None
            _copy(part.master.fileno(), self._master.fileno(), part.nbytes)
            through_mapping(self._master.fileno(), part.nbytes, write, writable=True)

    def replace(self, session: Session) -> None:
        assert self._master is not None
        session.renew(self.part, self._master)

    def give_up(self, session: Session, call: Call) -> None:
        """Cancel the update. If the daemon has committed it (an interrupted wait), it takes
        place.
        """
        try:
            call(protocol.GiveUp(session.next_id(), self.part.name, self._request))
        except InvalidArgument:
            return self.replace(session)
        except SwapdError as exc:  # the session has ended, and the daemon drops the update
            log.debug("an update could not be given up: %s", exc)
        if self._master is None:
            session.masters.forget(self._request)
        else:
            self._master.close()


def _owners(family: str, parts: list[Part]) -> dict[str, list[tuple[Part, str]]]:
    """Return the parts with a tensor, and its name there: by that name, or by part and name."""
    owners: dict[str, list[tuple[Part, str]]] = {}
    for part in parts:
        path = part.name.removeprefix(f"{family}/")
        for inner in part.layout.names():
            for name in (inner, f"{path}.{inner}"):
                owners.setdefault(name, []).append((part, inner))
    return owners


def _copy(source: int, target: int, nbytes: int) -> None:
    at = 0
    os.lseek(target, 0, os.SEEK_SET)
    while at < nbytes:
        at += os.sendfile(target, source, at, nbytes - at)
