"""Host copies whose content is certain outlive their sessions, within a bound."""

import pytest

from swapd.core import registry
from swapd.core.actions import Accept, DropHostCopy, KeepHostCopy, MakeHostCopy, SealHostCopy
from tests.core.world import Make, World

NBYTES = 4


def load(w: World, session: int, name: str, content: str = "", nbytes: int = NBYTES) -> int:
    """Register, fill and commit; return the uid of the host copy."""
    ask(w, session, name, content, nbytes)
    w.make_masters()
    w.commit(session, name)
    w.make_masters()
    return w.newest[name]


def ask(
    w: World, session: int, name: str, content: str = "", nbytes: int = NBYTES
) -> tuple[int, int]:
    return w.ask_register(session, name, nbytes, content=content or name, certain=True)


def kept(w: World) -> list[str]:
    return [w.ledger.host.owners[uid].name for uid in w.ledger.host.kept]


def made(w: World) -> list[tuple[str, int, bool]]:
    return [(a.name, a.original, a.certain) for a in w.out if isinstance(a, MakeHostCopy)]


def test_what_a_session_leaves_serves_the_next_which_need_not_compare(make: Make) -> None:
    w = make(20, keep_host=10)
    first, second = w.open(), w.open()
    uid = load(w, first, "a", "x")
    w.leave(first)
    assert KeepHostCopy(uid, "a") in w.out
    asked = ask(w, second, "b", "x")
    assert made(w) == [("b", uid, True)]
    assert w.out[-1] == DropHostCopy(uid, "a"), "its bytes are those of b now"
    w.make_masters()
    assert isinstance(w.answers[asked], Accept)
    assert kept(w) == []


def test_without_the_setting_nothing_is_kept_and_all_is_compared(make: Make) -> None:
    w = make(20)
    first, second = w.open(), w.open()
    uid = load(w, first, "a", "x")
    ask(w, second, "b", "x")
    assert made(w) == [("b", uid, False)]
    w.make_masters()
    w.leave(first)
    w.leave(second)
    assert w.dropped == w.masters


@pytest.mark.parametrize("end", ["leave", "unregister", "update"])
def test_it_is_kept_however_its_use_ends(make: Make, end: str) -> None:
    w = make(20, keep_host=10)
    session = w.open()
    load(w, session, "a")
    if end == "leave":
        w.leave(session)
    elif end == "unregister":
        w.unregister(session, "a")
    else:
        w.renew(session, "a")
    assert kept(w) == ["a"]


def test_the_least_recently_used_goes_first(make: Make) -> None:
    w = make(40, keep_host=2 * NBYTES)
    s = w.open()
    for name in "abc":
        load(w, s, name)
    for name in "ab":
        w.unregister(s, name)
    load(w, s, "a")
    w.unregister(s, "a")
    assert kept(w) == ["b", "a"]
    w.unregister(s, "c")
    assert kept(w) == ["a", "c"]
    w.change_rules(keep_host=NBYTES)
    assert kept(w) == ["c"]


def test_what_is_larger_than_the_bound_or_empty_displaces_nothing(make: Make) -> None:
    w = make(40, keep_host=10)
    s = w.open()
    for name, nbytes in (("a", NBYTES), ("large", 11), ("nil", 0)):
        load(w, s, name, nbytes=nbytes)
    for name in ("a", "large", "nil"):
        w.unregister(s, name)
    assert kept(w) == ["a"]


def test_descriptors_are_bounded_too(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "KEPT_MAX", 2)
    w = make(40, keep_host=100)
    s = w.open()
    for name in "abc":
        load(w, s, name, nbytes=1)
        w.unregister(s, name)
    assert kept(w) == ["b", "c"]


def test_what_is_guessed_or_written_or_not_sealed_is_not_kept(make: Make) -> None:
    w = make(40, keep_host=100)
    s = w.open()
    w.ask_register(s, "guessed", 1, content="bytes:1")
    w.ask_register(s, "written", 1, mutable=True)
    w.ask_register(s, "nameless", 1)
    w.make_masters()
    for name in ("guessed", "written", "nameless"):
        w.commit(s, name)
    ask(w, s, "half filled")
    w.make_masters()
    w.leave(s)
    assert kept(w) == []
    assert w.dropped == w.masters


def test_what_is_half_sealed_when_its_session_dies_is_not_kept(make: Make) -> None:
    w = make(40, keep_host=100)
    s = w.open()
    ask(w, s, "a")
    w.make_masters()
    w.commit(s, "a")
    w.leave(s)
    w.make_masters()
    assert w.dropped == w.masters


def test_who_is_killed_while_it_binds_leaves_what_it_found(make: Make) -> None:
    w = make(40, keep_host=100)
    load(w, s := w.open(), "a", "x")
    for _ in range(3):
        w.leave(s)
        ask(w, s := w.open(), "b", "x")
        w.make_masters()
    w.leave(s)
    assert kept(w) == ["b"]
    ask(w, w.open(), "c", "x")
    assert made(w) == [("c", w.newest["b"], True)]


def test_what_was_being_filled_meanwhile_takes_the_place_of_what_is_kept(make: Make) -> None:
    w = make(40, keep_host=100)
    s, t = w.open(), w.open()
    ask(w, s, "a", "x")
    ask(w, s, "b", "x")  # a session does not wait for itself: both are filled
    w.make_masters()
    w.commit(s, "a")
    w.make_masters()
    w.unregister(s, "a")
    assert kept(w) == ["a"]
    w.commit(s, "b")
    w.make_masters()
    assert kept(w) == []
    ask(w, t, "c", "x")
    assert made(w) == [("c", w.newest["b"], True)]


def test_two_ask_at_once_and_both_have_it(make: Make) -> None:
    w = make(40, keep_host=100)
    uid = load(w, s := w.open(), "a", "x")
    w.leave(s)
    ask(w, w.open(), "b", "x")
    assert made(w) == [("b", uid, True)]
    ask(w, w.open(), "c", "x")
    assert made(w) == [("c", w.newest["b"], True)]


def test_who_compared_a_guess_with_its_own_files_vouches_for_it(make: Make) -> None:
    w = make(40, keep_host=100)
    guess, s = w.open(), w.open()
    w.ask_register(guess, "a", NBYTES, content="x")
    w.make_masters()
    w.commit(guess, "a")
    w.make_masters()
    load(w, s, "b", "x")
    assert not any(certain for _, _, certain in made(w))
    w.leave(guess)
    w.leave(s)
    assert kept(w) == ["b"]


def test_kept_copies_give_way_to_what_lacks_memory_and_then_it_is_tried_again(make: Make) -> None:
    w = make(40, keep_host=100)
    s = w.open()
    for name in "abc":
        load(w, s, name)
        w.unregister(s, name)
    asked = w.ask_register(s, "d", 5)
    uid = w.newest["d"]
    w.make_master(uid, fail="host_memory")
    assert w.told() == ["drop host copy a", "drop host copy b", "makehostcopy d"]
    w.make_master(uid, fail="limit")
    assert w.told() == ["drop host copy c", "makehostcopy d"]
    w.make_master(uid)
    assert isinstance(w.answers[asked], Accept)
    asked = w.ask_register(s, "e", 5)
    w.make_master(w.newest["e"], fail="host_memory")
    assert w.refusal(asked).code == "host_memory", "nothing is left to give way"


@pytest.mark.parametrize("name", ["a", "f", "x"], ids=["component", "family", "content"])
def test_they_are_forgotten_by_any_of_their_names(make: Make, name: str) -> None:
    w = make(40, keep_host=100)
    s, other = w.open(), w.open()
    w.ask_register(s, "a", 1, content="x", certain=True, part_of="f")
    w.make_masters()
    w.commit(s, "a")
    w.make_masters()
    load(w, s, "b", "y")
    w.leave(s)
    refusal = w.refusal(w.forget(other, name, "z"))
    assert refusal.code == "unknown_component"
    assert "no host copy of 'z' is kept; kept: b, f" in refusal.message
    assert kept(w) == ["a", "b"]
    assert isinstance(w.answers[w.forget(other, name)], Accept)
    assert kept(w) == ["b"]
    assert isinstance(w.answers[w.forget(other)], Accept)
    assert w.dropped == w.masters
    assert isinstance(w.answers[w.forget(other)], Accept), "of nothing"


def test_to_forget_takes_nothing_from_who_binds_it(make: Make) -> None:
    w = make(40, keep_host=100)
    load(w, s := w.open(), "a", "x")
    w.leave(s)
    binds = w.open()
    ask(w, binds, "b", "x")
    assert isinstance(w.answers[w.forget(w.open())], Accept)
    w.make_masters()
    w.commit(binds, "b")
    w.make_masters()
    w.leave(binds)
    assert kept(w) == ["b"]


def test_a_stop_frees_them_and_keeps_no_more(make: Make) -> None:
    w = make(40, keep_host=100)
    first, second = w.open(), w.open()
    load(w, first, "a")
    load(w, second, "b")
    w.leave(first)
    w.stop()
    w.leave(second)
    assert w.dropped == w.masters


def test_what_an_earlier_daemon_kept_is_kept_once_it_is_mapped(make: Make) -> None:
    w = make(20, keep_host=10)
    uid = w.find("a", NBYTES, "x")
    assert w.out == [SealHostCopy(uid, "a")]
    w.make_masters()
    assert w.out == [KeepHostCopy(uid, "a")]
    ask(w, w.open(), "b", "x")
    assert made(w) == [("b", uid, True)]
    assert w.out[-1] == DropHostCopy(uid, "a")


def test_who_asks_before_that_waits_for_it_and_does_not_fill(make: Make) -> None:
    w = make(20, keep_host=10)
    uid = w.find("a", NBYTES, "x")
    ask(w, w.open(), "b", "x")
    assert made(w) == []
    w.make_masters()
    makes = [a for a in w.log if isinstance(a, MakeHostCopy)]
    assert [(a.name, a.original, a.certain) for a in makes] == [("b", uid, True)]
    assert kept(w) == []
    assert w.dropped == {uid}


def test_or_fills_when_it_cannot_be_mapped(make: Make) -> None:
    w = make(20, keep_host=10)
    uid = w.find("a", NBYTES, "x")
    ask(w, w.open(), "b", "x")
    w.make_master(uid, "host_memory")
    assert made(w) == [("b", 0, False)]
    assert w.dropped == {uid}


@pytest.mark.parametrize("layout", ["", "another"])
def test_one_of_another_content_size_or_layout_serves_nobody(make: Make, layout: str) -> None:
    w = make(20, keep_host=10)
    w.find("a", NBYTES, "x", layout=layout)
    w.find("a", NBYTES, "y")
    w.make_masters()
    ask(w, w.open(), "b", "x", NBYTES + (not layout))
    assert made(w) == [("b", 0, False)]


def test_the_bound_holds_for_them_too(make: Make) -> None:
    w = make(40, keep_host=2 * NBYTES)
    for content in "abc":
        w.find(content, NBYTES, content)
    w.make_masters()
    assert kept(w) == ["b", "c"]
    w.stop()
    assert w.dropped == w.masters
