"""Prefetches that name the components to evict: a stage whose requests go on to the next stage."""

from tests.core.world import Make, World, outcome


def stages(make: Make, room: int, **parts: int) -> tuple[World, dict[str, int]]:
    """Families of `parts` parts of 2 chunks, one for each session; used once, in this order."""
    w = make(room)
    sessions = {name: w.open() for name in parts}
    for name, count in parts.items():
        for i in range(count):
            w.register(sessions[name], f"{name}/{i}", 2, part_of=name)
        w.touch(sessions[name], name)
    return w, sessions


def there(w: World) -> list[str]:
    """The components on the device, or loading."""
    return sorted(c.name for c in w.ledger.components.values() if c.on_device and not c.evicting)


def test_it_takes_the_place_of_what_may_go_for_it(make: Make) -> None:
    """It evicts nothing else, though another component was used longer ago."""
    w, s = stages(make, 8, code2wav=2, other=1, thinker=1, talker=1)
    assert there(w) == ["code2wav/0", "other/0", "talker/0", "thinker/0"]
    held = w.use(s["talker"], "talker")
    w.prefetch(s["talker"], "code2wav", over=("thinker",))
    assert outcome(w)[1:] == ["evict thinker/0 (room)", "revoke thinker/0", "copy in code2wav/1"]
    w.settle()
    assert there(w) == ["code2wav/0", "code2wav/1", "other/0", "talker/0"]
    w.release(held)


def test_a_component_in_no_family_may_go_for_it_too(make: Make) -> None:
    w, s = stages(make, 4, code2wav=1, talker=1)
    w.register(s["talker"], "vae", 2)
    w.touch(s["talker"], "vae")
    assert there(w) == ["talker/0", "vae"]
    w.prefetch(s["talker"], "code2wav", over=("vae",))
    w.settle()
    assert there(w) == ["code2wav/0", "talker/0"]


def test_it_waits_until_what_may_go_for_it_is_idle_and_tells_nobody(make: Make) -> None:
    w, s = stages(make, 8, code2wav=1, talker=2, thinker=2)
    held = w.use(s["thinker"], "thinker")
    w.prefetch(s["thinker"], "code2wav", over=("thinker",))
    w.sleep(100.0)
    assert w.moves == {}
    assert not w.wanted
    w.release(held)
    assert outcome(w)[-3:] == ["evict thinker/1 (room)", "revoke thinker/1", "copy in code2wav/0"]


def test_it_takes_free_room_though_nothing_may_go_for_it(make: Make) -> None:
    w, s = stages(make, 6, code2wav=1, talker=2, thinker=1)
    assert there(w) == ["talker/0", "talker/1", "thinker/0"]
    w.prefetch(s["talker"], "code2wav", over=())
    assert w.moves == {}
    w.leave(s["thinker"])
    assert outcome(w)[-1] == "copy in code2wav/0"


def test_it_takes_nothing_while_somebody_waits(make: Make) -> None:
    w, s = stages(make, 6, code2wav=1, talker=3, thinker=2)
    held = w.use(s["thinker"], "thinker")
    waits = w.acquire(s["talker"], "talker")
    w.prefetch(s["thinker"], "code2wav", over=("talker", "thinker"))
    assert w.moves == {}
    w.release(held)
    w.settle()
    assert w.granted(waits)
    assert there(w) == ["talker/0", "talker/1", "talker/2"]


def test_it_comes_in_part_by_part_so_that_who_asks_waits_for_one_copy(make: Make) -> None:
    w, s = stages(make, 8, code2wav=3, talker=3, thinker=4)
    assert there(w) == ["thinker/0", "thinker/1", "thinker/2", "thinker/3"]
    w.prefetch(s["thinker"], "code2wav", over=("thinker", "talker"))
    assert outcome(w)[-1] == "copy in code2wav/0"
    assert len(w.moves) == 1
    asked = w.acquire(s["talker"], "talker/0", "talker/1", "talker/2")
    w.move("code2wav/0")
    w.settle()
    assert w.granted(asked)
    assert there(w) == ["code2wav/0", "talker/0", "talker/1", "talker/2"]
    w.release(asked)
    assert outcome(w)[-1] == "copy in code2wav/1"


def test_nothing_that_is_expected_itself_goes_for_it(make: Make) -> None:
    w, s = stages(make, 6, code2wav=2, talker=2, thinker=3)
    w.prefetch(s["thinker"], "talker", over=("thinker",))
    w.settle()
    assert there(w) == ["talker/0", "talker/1", "thinker/0"]
    w.prefetch(s["thinker"], "code2wav", over=("thinker", "talker"))
    w.settle()
    assert there(w) == ["code2wav/0", "talker/0", "talker/1"]
    w.touch(s["talker"], "talker")
    w.settle()
    assert there(w) == ["code2wav/0", "code2wav/1", "talker/0"], "it was used"


def test_what_is_in_and_expected_stays_until_it_was_used(make: Make) -> None:
    w, s = stages(make, 6, code2wav=1, talker=1, thinker=2)
    w.prefetch(s["thinker"], "talker", over=())
    assert there(w) == ["talker/0", "thinker/0", "thinker/1"], "it was there"
    w.prefetch(s["talker"], "code2wav", over=("talker",))
    assert w.moves == {}
    w.release(w.use(s["talker"], "talker"))
    w.settle()
    assert there(w) == ["code2wav/0", "thinker/0", "thinker/1"]


def test_what_is_held_when_it_is_expected_may_go_once_it_is_released(make: Make) -> None:
    w, s = stages(make, 4, code2wav=1, talker=1, thinker=1)
    held = w.use(s["talker"], "talker")
    w.prefetch(s["thinker"], "talker", over=())
    w.release(held)
    w.prefetch(s["thinker"], "code2wav", over=("talker",))
    w.settle()
    assert there(w) == ["code2wav/0", "thinker/0"]


def test_no_part_goes_for_another_of_its_family(make: Make) -> None:
    w, s = stages(make, 4, talker=2, thinker=1)
    assert there(w) == ["talker/0", "thinker/0"]
    held = w.use(s["thinker"], "thinker")
    for over in (("talker",), None):
        w.prefetch(s["thinker"], "talker/1", over=over)
        assert w.moves == {}
    w.release(held)
    w.settle()
    assert there(w) == ["talker/0", "talker/1"]


def test_a_smaller_part_comes_in_though_there_is_no_room_for_a_larger(make: Make) -> None:
    w = make(6)
    s = w.open()
    for name, size in (("f/0", 4), ("f/1", 5), ("f/2", 2)):
        w.register(s, name, size, part_of="f")
    w.register(s, "held", 3)
    held = w.use(s, "held")
    w.prefetch(s, "f", over=())
    assert outcome(w)[-1] == "copy in f/2"
    w.settle()
    w.release(held)


def test_what_is_not_registered_is_left_out(make: Make) -> None:
    w = make(4)
    s = w.open()
    key = w.prefetch(s, "none", over=("nobody",))
    assert w.told() == [f"accept {key[1]}"]
    assert w.ledger.prefetches == {}
    w.register(s, "a", 2)
    w.prefetch(s, "none", "a", over=("nobody",))
    assert outcome(w)[-1] == "copy in a"


def test_what_is_asked_for_takes_the_place_of_what_was_expected(make: Make) -> None:
    w, s = stages(make, 4, talker=2, thinker=2)
    w.prefetch(s["thinker"], "talker", over=("thinker",))
    w.settle()
    assert there(w) == ["talker/0", "talker/1"]
    asked = w.acquire(s["thinker"], "thinker")
    w.settle()
    assert w.granted(asked)


def test_what_keeps_its_quantum_does_not_go_for_it(make: Make) -> None:
    w = make(4)
    s = w.open()
    w.register(s, "talker", 2)
    w.register(s, "thinker", 4)
    asked = w.acquire(s, "thinker")
    w.sleep(0.1)  # as long as its load takes
    w.settle()
    w.release(asked)
    w.touch(s, "thinker")  # it came back at once
    w.prefetch(s, "talker", over=("thinker",))
    assert w.moves == {}
    w.sleep(100.0)
    w.settle()
    assert there(w) == ["talker"]


def test_of_what_may_go_for_it_the_least_recently_used_goes(make: Make) -> None:
    w, s = stages(make, 6, code2wav=1, zero=1, thinker=1, talker=1)
    w.prefetch(s["talker"], "code2wav", over=("thinker", "zero"))
    w.settle()
    assert there(w) == ["code2wav/0", "talker/0", "thinker/0"]


def test_a_rival_stays_that_may_not_go_for_it(make: Make) -> None:
    w = make(10)
    s = w.open()
    for name in ("a", "b"):
        w.register(s, name, 2, policy="alternating", group="g")
    w.touch(s, "a")
    w.prefetch(s, "b", over=("c",))
    assert w.moves == {}
    w.prefetch(s, "b", over=("a",))
    w.settle()
    assert there(w) == ["b"]
