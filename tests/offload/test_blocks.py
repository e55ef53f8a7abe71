"""The modules by which a component is streamed."""

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
from torch.nn import Linear, Module, ModuleList, Parameter, Sequential

from swapd_client.errors import InvalidSource
from swapd_client.offload.blocks import blocks_of

#: The bytes of one `Linear(8, 8, bias=False)`.
SIZE = 8 * 8 * 4


def linear() -> Module:
    return Linear(8, 8, bias=False)


class Two(Module):
    """Two lists of blocks, as in many DiTs, and other modules."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = linear()
        self.pairs = ModuleList([Sequential(linear(), linear()) for _ in range(2)])
        self.singles = ModuleList([linear() for _ in range(3)])
        self.out = linear()


class Declares(Two):
    _layerwise_offload_blocks_attrs: ClassVar = ["singles"]


class DeclaresAsBefore(Two):
    _layerwise_offload_blocks_attr = "pairs"


class DeclaresWhatIsNotThere(Two):
    _layerwise_offload_blocks_attrs: ClassVar = ["singles", "triple"]


def names(component: Module, named: list[str] | None = None, least: int = 0) -> list[str]:
    return [block.name for block in blocks_of(component, named, least)]


def test_a_class_that_knows_its_blocks_is_believed() -> None:
    assert names(Declares()) == ["singles.0", "singles.1", "singles.2"]


def test_the_old_name_of_the_attribute_is_read_with_a_warning() -> None:
    with pytest.warns(FutureWarning, match=r"set _layerwise_offload_blocks_attrs = \['pairs'\]"):
        assert names(DeclaresAsBefore()) == ["pairs.0", "pairs.1"]


def test_a_declared_list_that_is_not_there_is_an_error() -> None:
    with pytest.raises(InvalidSource, match=r"pairs, singles"):
        names(DeclaresWhatIsNotThere())


class InLists(Module):
    """Vocoders keep each of their upsamplers in a list of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.ups = ModuleList([ModuleList([linear()]) for _ in range(3)])


def test_of_a_list_in_a_list_it_is_said_what_is_called() -> None:
    model = InLists()
    assert names(model) == names(model, ["ups"]) == ["ups.0", "ups.1", "ups.2"]
    (both, last) = blocks_of(model, least=2 * SIZE)
    assert both.name == "ups.0-1"
    assert both.modules == (model.get_submodule("ups.0.0"), model.get_submodule("ups.1.0"))
    assert last.modules == (model.get_submodule("ups.2.0"),)


def test_the_caller_knows_best() -> None:
    assert names(Declares(), ["pairs", "out"]) == ["pairs.0", "pairs.1", "out"]
    assert names(Two(), ["pairs.1"]) == ["pairs.1.0", "pairs.1.1"]
    with pytest.raises(InvalidSource, match="blocks names 'nothing'"):
        names(Two(), ["nothing"])


def test_lists_of_like_modules_are_found() -> None:
    blocks = blocks_of(Two())
    assert [b.name for b in blocks] == ["pairs.0", "pairs.1", "singles.0", "singles.1", "singles.2"]
    assert [b.nbytes for b in blocks] == [2 * SIZE] * 2 + [SIZE] * 3


def test_the_outermost_lists_are_meant() -> None:
    inner = [ModuleList([linear() for _ in range(2)]) for _ in range(2)]
    assert names(Sequential(ModuleList(inner))) == ["0.0", "0.1"]


def test_a_list_of_unlike_modules_is_looked_into() -> None:
    unlike = ModuleList([Two(), Sequential(linear())])
    assert names(Sequential(unlike)) == [
        *("0.0.pairs.0", "0.0.pairs.1"),
        *("0.0.singles.0", "0.0.singles.1", "0.0.singles.2"),
    ]


def test_lists_that_have_little_of_it_are_not_blocks() -> None:
    model = Two()
    model.pairs = ModuleList([Linear(1, 1) for _ in range(2)])
    assert names(model) == ["singles.0", "singles.1", "singles.2"]
    model.embed = Linear(100, 100)
    assert names(model) == [], "most of it would stay anyway"


def test_what_has_no_lists_has_no_blocks() -> None:
    assert names(linear()) == []
    assert names(Sequential(linear(), linear())) == []


def test_small_neighbours_are_one_block() -> None:
    assert names(Two(), least=2 * SIZE) == ["pairs.0", "pairs.1", "singles.0-1", "singles.2"]
    assert names(Two(), least=3 * SIZE) == ["pairs.0-1", "singles.0-2"]
    (only,) = blocks_of(Declares(), least=1 << 20)
    assert only.name == "singles.0-2"
    assert len(only.modules) == 3


def test_one_block_under_two_names_is_one() -> None:
    shared = linear()
    model = Sequential(ModuleList([shared, linear(), shared]))
    assert names(model) == ["0.0", "0.1"]


class Counted(Linear):
    """Counts the queries for its children."""

    asked = 0

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Parameter]]:
        Counted.asked += 1
        return super().named_parameters(*args, **kwargs)


def test_a_long_list_of_small_blocks_is_gone_through_once() -> None:
    blocks = ModuleList(Counted(1, 1) for _ in range(300))
    (one,) = blocks_of(Sequential(blocks), least=1 << 20)
    assert len(one.modules) == 300
    assert Counted.asked <= 2 * 300
