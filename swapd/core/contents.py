"""Decides which host copy a worker fills, and which share the bytes of another. Pure.

Two components of the same content need its bytes once. The first request fills a host copy. Later
requests wait, and share that host copy when it is sealed. If it fails or takes too long, the next
waiter fills its own.

Clients name the content, and the core does not trust the name: before it commits, a client compares
every shared byte with its own files. So the daemon needs no trust in a client, no descriptor of a
file, and no reading of files, in which one slow disk could delay all. The comparison takes 0.6 to
0.75 of the time of filling, with files in the page cache.

A client says whether its name is *certain*: whether other bytes would have another name. A host
copy that was committed under such a name is *vouched for*, and so is each that shares it. Those may
be kept without a component (`Rules.keep_host`), and then nobody compares.
"""

from collections.abc import Hashable
from typing import NamedTuple

from swapd.core.queue import Deadlines


class Due(NamedTuple):
    """A host copy to make now: the worker fills it, or it shares that of `original`."""

    uid: int
    original: int = 0
    #: Whether `original` is vouched for.
    certain: bool = False


class _Content:
    """All host copies that have or need the same bytes, by uid."""

    def __init__(self) -> None:
        #: The host copy that is being filled and that others wait for; and its session.
        self.filling: int | None = None
        self.filler = 0
        #: Host copies with the bytes: sealed, or ordered to share those of another; and whether
        #: each is vouched for.
        self.filled: dict[int, bool] = {}
        #: Host copies that wait for them, with their sessions.
        self.waiting: dict[int, int] = {}
        #: All of these, and those that fill their own: no other waits for these, but they may be
        #: the first to be filled. And whether the name that each gave is certain.
        self.asked: dict[int, bool] = {}


class Contents:
    """All contents. Host copies without a content are not in here. Times are on the clock of
    events."""

    def __init__(self) -> None:
        self._contents: dict[Hashable, _Content] = {}
        self._of: dict[int, Hashable] = {}
        #: All that wait, with the time at which each stops waiting.
        self._until: Deadlines[int] = Deadlines()

    def __len__(self) -> int:
        """Number of host copies that have a content."""
        return len(self._of)

    def __contains__(self, uid: int) -> bool:
        """Whether this host copy waits."""
        return uid in self._until

    def next_deadline(self) -> float | None:
        return self._until.next()

    def is_last(self, uid: int) -> bool:
        """Whether it alone of its content is vouched for."""
        content = self._content_of(uid)
        return content is not None and [u for u, sure in content.filled.items() if sure] == [uid]

    def ask(
        self, uid: int, session: int, key: Hashable, until: float, *, certain: bool = False
    ) -> Due | None:
        """`uid` needs the bytes of `key`; None: it waits, at most until `until`.

        A session never waits for one that waits for it: two sessions that load the same components
        in different orders would wait for each other.
        """
        content = self._contents.setdefault(key, _Content())
        content.asked[uid] = certain
        self._of[uid] = key
        if content.filled:
            return self._share(content, uid)
        if content.filling is None:
            content.filling, content.filler = uid, session
            return Due(uid)
        if self._waits_for(content.filler, session):
            return Due(uid)
        content.waiting[uid] = session
        self._until.set(uid, until)
        return None

    def sealed(self, uid: int) -> list[Due]:
        """The host copy of `uid` is filled: the waiting ones share it."""
        content = self._content_of(uid)
        if content is None:
            return []
        content.filled[uid] = content.asked[uid] or content.filled.get(uid, False)
        if content.filling == uid:
            content.filling, content.filler = None, 0
        return [self._share(content, other) for other in list(content.waiting)]

    def gone(self, uid: int) -> list[Due]:
        """The host copy of `uid` is dropped, or will never exist: others may have to be filled."""
        content = self._content_of(uid)
        if content is None:
            return []
        content.filled.pop(uid, None)
        self._wait_no_more(content, uid)
        all_due = []
        if content.filling == uid:
            content.filling, content.filler = next(iter(content.waiting), None), 0
            if content.filling is not None:
                content.filler = content.waiting[content.filling]
                all_due.append(self._fill(content, content.filling))
                for other, session in list(content.waiting.items()):
                    if self._waits_for(content.filler, session):
                        all_due.append(self._fill(content, other))
        content.asked.pop(uid, None)
        key = self._of.pop(uid)
        if not content.asked:
            del self._contents[key]
        return all_due

    def expired(self, now: float) -> list[Due]:
        """The waiters whose time is over fill their own."""
        return [self._fill(self._contents[self._of[uid]], uid) for uid in self._until.over(now)]

    def _waits_for(self, one: int, other: int) -> bool:
        """Whether session `one` is `other`, or waits for `other`, directly or through other
        sessions."""
        seen: set[int] = set()
        todo = [one]
        while todo:
            session = todo.pop()
            if session == other:
                return True
            if session not in seen:
                seen.add(session)
                todo += [
                    content.filler
                    for content in self._contents.values()
                    if session in content.waiting.values()
                ]
        return False

    def _content_of(self, uid: int) -> _Content | None:
        return self._contents[self._of[uid]] if uid in self._of else None

    def _share(self, content: _Content, uid: int) -> Due:
        original = max(content.filled, key=content.filled.__getitem__)
        self._wait_no_more(content, uid)
        content.filled[uid] = certain = content.filled[original]
        return Due(uid, original, certain)

    def _fill(self, content: _Content, uid: int) -> Due:
        self._wait_no_more(content, uid)
        return Due(uid)

    def _wait_no_more(self, content: _Content, uid: int) -> None:
        content.waiting.pop(uid, None)
        self._until.drop(uid)
