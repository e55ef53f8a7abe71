"""Decides which host copy a worker fills, and which share the bytes of another. Pure.

The core does not trust the name of a content: before a client commits, it compares the shared bytes
with its own files, in 0.6 to 0.75 of the time of filling (files in the page cache). So the daemon
reads no files, and no slow disk delays it.

A name is *certain* if its client says that no other bytes ever have it. A host copy committed under
it, and each that shares it, is *vouched for*: it may be kept without a component
(`Rules.keep_host`), and needs no comparison.
"""

from collections import defaultdict
from collections.abc import Hashable
from typing import NamedTuple

from swapd.core.queue import Deadlines


class DueHostCopy(NamedTuple):
    """A host copy to make now: filled by its worker, or sharing the bytes of `original`."""

    uid: int
    original: int = 0
    certain: bool = False


class _Content:
    def __init__(self) -> None:
        #: The host copy that is being filled for all, and its session.
        self.filling: int | None = None
        self.filler = 0
        #: Host copies that have or share the bytes: whether each is vouched for. `origins`: the
        #: host copy whose worker filled in these bytes.
        self.filled: dict[int, bool] = {}
        self.origins: dict[int, int] = {}
        #: Host copies that wait for the bytes, with their sessions.
        self.waiting: dict[int, int] = {}
        #: All host copies of this content, also those that fill their own; whether the name of each
        #: is certain.
        self.asked: dict[int, bool] = {}


class Contents:
    """All host copies with a content. Times are on the events' clock."""

    def __init__(self) -> None:
        self._contents: dict[Hashable, _Content] = {}
        self._of: dict[int, Hashable] = {}
        self._until: Deadlines[int] = Deadlines()
        #: The host copies of each session that wait.
        self._waiting: defaultdict[int, set[int]] = defaultdict(set)

    def __len__(self) -> int:
        return len(self._of)

    def __contains__(self, uid: int) -> bool:
        """Return whether this host copy waits."""
        return uid in self._until

    def next_deadline(self) -> float | None:
        return self._until.next()

    def is_last(self, uid: int) -> bool:
        """Return whether no other host copy of its content is vouched for, but this one is."""
        content = self._content_of(uid)
        return content is not None and [u for u, sure in content.filled.items() if sure] == [uid]

    def origin(self, uid: int) -> int:
        """Return the host copy that was filled with the bytes of `uid`; 0 if it has no content. The
        name of a content alone does not make two host copies the same."""
        content = self._content_of(uid)
        return content.origins.get(uid, 0) if content is not None else 0

    def ask(
        self, uid: int, session: int, key: Hashable, until: float, *, certain: bool = False
    ) -> DueHostCopy | None:
        """Ask for the bytes of `key`; None: the host copy waits, at most until `until`. A session
        never waits for one that waits for it: two that load the same components in different orders
        would block each other."""
        content = self._contents.setdefault(key, _Content())
        content.asked[uid] = certain
        self._of[uid] = key
        if content.filled:
            return self._share(content, uid)
        if content.filling is None:
            content.filling, content.filler = uid, session
            return DueHostCopy(uid)
        if session in self._waited_for(content.filler):
            return DueHostCopy(uid)
        content.waiting[uid] = session
        self._waiting[session].add(uid)
        self._until.set(uid, until)
        return None

    def sealed(self, uid: int) -> list[DueHostCopy]:
        """Note that `uid` is filled; return those that waited, and share it now."""
        content = self._content_of(uid)
        if content is None:
            return []
        content.filled[uid] = content.asked[uid] or content.filled.get(uid, False)
        content.origins.setdefault(uid, uid)
        if content.filling == uid:
            content.filling, content.filler = None, 0
        return [self._share(content, other) for other in list(content.waiting)]

    def gone(self, uid: int) -> list[DueHostCopy]:
        """Note that `uid` is dropped or was never made; return those to fill instead."""
        content = self._content_of(uid)
        if content is None:
            return []
        content.filled.pop(uid, None)
        content.origins.pop(uid, None)
        self._wait_no_more(content, uid)
        all_due = []
        if content.filling == uid:
            content.filling, content.filler = next(iter(content.waiting), None), 0
            if content.filling is not None:
                content.filler = content.waiting[content.filling]
                all_due.append(self._fill(content, content.filling))
                awaited = self._waited_for(content.filler)
                for other, session in list(content.waiting.items()):
                    if session in awaited:
                        all_due.append(self._fill(content, other))
        content.asked.pop(uid, None)
        key = self._of.pop(uid)
        if not content.asked:
            del self._contents[key]
        return all_due

    def expired(self, now: float) -> list[DueHostCopy]:
        return [self._fill(self._contents[self._of[uid]], uid) for uid in self._until.over(now)]

    def _waited_for(self, by: int) -> set[int]:
        """Return the sessions that session `by` waits for, and itself."""
        seen: set[int] = set()
        todo = [by]
        while todo:
            if (session := todo.pop()) not in seen:
                seen.add(session)
                waiting = self._waiting.get(session, ())
                todo += [self._contents[self._of[uid]].filler for uid in waiting]
        return seen

    def _content_of(self, uid: int) -> _Content | None:
        return self._contents[self._of[uid]] if uid in self._of else None

    def _share(self, content: _Content, uid: int) -> DueHostCopy:
        original = max(content.filled, key=content.filled.__getitem__)
        self._wait_no_more(content, uid)
        content.filled[uid] = certain = content.filled[original]
        content.origins[uid] = content.origins[original]
        return DueHostCopy(uid, original, certain)

    def _fill(self, content: _Content, uid: int) -> DueHostCopy:
        self._wait_no_more(content, uid)
        return DueHostCopy(uid)

    def _wait_no_more(self, content: _Content, uid: int) -> None:
        if (session := content.waiting.pop(uid, None)) is not None:
            self._waiting[session].remove(uid)
            if not self._waiting[session]:
                del self._waiting[session]
        self._until.drop(uid)
