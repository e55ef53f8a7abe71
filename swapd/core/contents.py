"""Which master fills which content, and which shares what another has filled. Pure.

Two components of the same content need its bytes once. The first that asks fills a master; others
that ask meanwhile wait, and share that one when it is sealed. If it comes to nothing, or takes too
long, the next fills its own.

What a content stands for is what clients say, and nobody here believes it: a client compares what
it is to share with its own files, every byte, before it commits. That needs no trust in anybody's
word, no descriptor of a file in the daemon, and no reading there, which one slow disk could hold up
for all; and it costs less than filling would (0.6 to 0.75 of that, of files in the page cache).
"""

from collections.abc import Hashable
from typing import NamedTuple

from swapd.core.orders import Deadlines


class Due(NamedTuple):
    """A master that is to be made now: to be filled, or to share that of `original`."""

    uid: int
    original: int = 0


class _Content:
    """All that have or want the same bytes, by uid."""

    def __init__(self) -> None:
        #: Which fills it, of those that others wait for; and of what session.
        self.filling: int | None = None
        self.filler = 0
        #: Whose masters have it: sealed, or ordered to share one that has it.
        self.filled: dict[int, None] = {}
        #: Those that wait for it, with their sessions.
        self.waiting: dict[int, int] = {}
        #: All of these, and those that fill their own: nobody waits for them, but they may be
        #: the first to be filled.
        self.asked: set[int] = set()


class Contents:
    """Masters without a content are not told of. Times are on the events' clock."""

    def __init__(self) -> None:
        self._contents: dict[Hashable, _Content] = {}
        self._of: dict[int, Hashable] = {}
        #: All that wait, by until when.
        self._until: Deadlines[int] = Deadlines()

    def __len__(self) -> int:
        """How many are told of."""
        return len(self._of)

    def __contains__(self, uid: int) -> bool:
        """Whether it waits."""
        return uid in self._until

    def next_deadline(self) -> float | None:
        """When the first has waited long enough; None if none waits."""
        return self._until.next()

    def ask(self, uid: int, session: int, key: Hashable, until: float) -> Due | None:
        """`uid` needs the bytes that `key` stands for; None: it waits, `until` then at most.

        None waits for a session that waits for its own: two that load the same in another order
        would wait for each other.
        """
        content = self._contents.setdefault(key, _Content())
        content.asked.add(uid)
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
        """The master of `uid` is filled: those that waited share it."""
        content = self._content_of(uid)
        if content is None:
            return []
        content.filled[uid] = None
        if content.filling == uid:
            content.filling, content.filler = None, 0
        return [self._share(content, other) for other in list(content.waiting)]

    def gone(self, uid: int) -> list[Due]:
        """The master of `uid` is dropped, or will never be made: others may have to be filled."""
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
        content.asked.discard(uid)
        key = self._of.pop(uid)
        if not content.asked:
            del self._contents[key]
        return all_due

    def expired(self, now: float) -> list[Due]:
        """Those that have waited long enough fill their own."""
        return [self._fill(self._contents[self._of[uid]], uid) for uid in self._until.over(now)]

    def _waits_for(self, one: int, other: int) -> bool:
        """Whether the session `one` is `other`, or waits for what that one fills, however long
        the way."""
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
        original = next(iter(content.filled))
        self._wait_no_more(content, uid)
        content.filled[uid] = None
        return Due(uid, original)

    def _fill(self, content: _Content, uid: int) -> Due:
        self._wait_no_more(content, uid)
        return Due(uid)

    def _wait_no_more(self, content: _Content, uid: int) -> None:
        content.waiting.pop(uid, None)
        self._until.drop(uid)
