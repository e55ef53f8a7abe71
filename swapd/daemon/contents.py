"""Who fills which content, and who shares what another has filled. Pure; used on the loop only.

Two components of the same content need its bytes once. The first who asks fills a master; who
asks meanwhile waits, and shares that one when it is sealed. If it comes to nothing, or takes
too long, who waits fills its own. Waiting takes no thread: `then` is called when it is over.

What a content stands for is what clients say, and nobody here believes it: a client compares what
it is to share with its own files, every byte, before it commits. That needs no trust in anybody's
word, no descriptor of a file in the daemon, and no reading there, which one slow disk could hold up
for all; and it costs less than filling would (0.6 to 0.75 of that, of files in the page cache).
"""

from collections.abc import Callable, Hashable
from typing import NamedTuple, Protocol

#: Called once: with the uid of the sealed master to share, or None to make another.
Then = Callable[[int | None], None]


class Timer(Protocol):
    def cancel(self) -> None: ...


class _Waiting(NamedTuple):
    session: int
    then: Then
    timer: Timer


class _Content:
    """All who have or want the same bytes, by uid."""

    def __init__(self) -> None:
        #: Who is filling it, of those that others wait for.
        self.filling: int | None = None
        #: The session of `filling`.
        self.filler = 0
        #: Whose masters have it, sealed or shared from one that was.
        self.filled: dict[int, None] = {}
        self.waiting: dict[int, _Waiting] = {}
        #: All of these, and those that fill their own: nobody waits for them, but they may be
        #: the first to be filled.
        self.asked: set[int] = set()


class Contents:
    """`call_later(seconds, call)` is the loop's. Masters without a content are not told of."""

    def __init__(self, call_later: Callable[[float, Callable[[], None]], Timer]) -> None:
        self._call_later = call_later
        self._contents: dict[Hashable, _Content] = {}
        self._of: dict[int, Hashable] = {}

    def ask(self, uid: int, session: int, key: Hashable, patience_s: float, then: Then) -> None:
        """`uid` needs the bytes that `key` stands for: call `then`, now or when that is known.

        Nobody waits for a session that waits for it: two that load the same in another order
        would wait for each other.
        """
        content = self._contents.setdefault(key, _Content())
        content.asked.add(uid)
        self._of[uid] = key
        if content.filled:
            self._share(content, uid, then)
        elif content.filling is None:
            content.filling, content.filler = uid, session
            then(None)
        elif self._waits_for(content.filler, session):
            then(None)
        else:
            timer = self._call_later(patience_s, lambda: self._wait_no_more(content, uid))
            content.waiting[uid] = _Waiting(session, then, timer)

    def sealed(self, uid: int) -> None:
        """The master of `uid` is filled: those that waited share it."""
        content = self._content_of(uid)
        if content is None:
            return
        content.filled[uid] = None
        if content.filling == uid:
            content.filling = None
        for other, waiting in list(content.waiting.items()):
            waiting.timer.cancel()
            del content.waiting[other]
            self._share(content, other, waiting.then)

    def gone(self, uid: int) -> None:
        """The master of `uid` is dropped, or will never be made."""
        content = self._content_of(uid)
        if content is None:
            return
        content.filled.pop(uid, None)
        if uid in content.waiting:
            content.waiting.pop(uid).timer.cancel()
        if content.filling == uid:
            content.filling = next(iter(content.waiting), None)
            if content.filling is not None:
                content.filler = content.waiting[content.filling].session
                self._wait_no_more(content, content.filling)
                for other, waiting in list(content.waiting.items()):
                    if self._waits_for(content.filler, waiting.session):
                        self._wait_no_more(content, other)
        content.asked.discard(uid)
        key = self._of.pop(uid)
        if not content.asked:
            del self._contents[key]

    def close(self) -> None:
        """Nobody is called any more."""
        for content in self._contents.values():
            for waiting in content.waiting.values():
                waiting.timer.cancel()
        self._contents.clear()
        self._of.clear()

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
                    if any(waiting.session == session for waiting in content.waiting.values())
                ]
        return False

    def _content_of(self, uid: int) -> _Content | None:
        return self._contents[self._of[uid]] if uid in self._of else None

    def _share(self, content: _Content, uid: int, then: Then) -> None:
        original = next(iter(content.filled))
        content.filled[uid] = None
        then(original)

    @staticmethod
    def _wait_no_more(content: _Content, uid: int) -> None:
        """It fills its own."""
        waiting = content.waiting.pop(uid)
        waiting.timer.cancel()
        waiting.then(None)
