"""Components straight from files: the same bits, held once, in any number of processes."""

import json
import os
import sys
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import swapd_client
from swapd import spawn
from swapd_client import Client, DuplicateName, InvalidArgument, InvalidSource
from swapd_client.weights import contents
from swapd_client.weights.safetensors import File
from tests.weights.test_update import await_host_copies, copies, same, seen

KIB = 1 << 10


class Net(nn.Module):
    """Odd shapes, a tie, buffers of both kinds."""

    steps: torch.Tensor
    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 6)
        self.norm = nn.BatchNorm1d(6)
        self.mix = nn.Linear(6, 6)
        self.head = nn.Linear(6, 17, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.arange(6.0), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.mix(self.norm(self.embed(ids)) + self.table))
        return out


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    made = Net().eval()
    made.norm.running_mean.uniform_()  # type: ignore[union-attr]
    return made


def bare() -> Net:
    """Its parameters are on the meta device; buffers that no file has are not."""
    with torch.device("meta"):
        made = Net().eval()
    made.table = torch.arange(6.0)
    return made


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A file of `net()`, with the tied tensor once."""
    state = net().state_dict()
    del state["head.weight"]
    save_file(state, tmp_path / "net.safetensors")
    return tmp_path / "net.safetensors"


IDS = torch.tensor([3, 1, 4, 1, 5])


# --- into a module -----------------------------------------------------------------------


@pytest.mark.parametrize("build", [bare, lambda: net(1)], ids=["meta", "real"])
def test_a_module_has_the_bits_of_the_file(client: Client, saved: Path, build: type[Net]) -> None:
    module, twin = build(), net()
    part = client.load("net", saved, module)
    with client.acquire("net"):
        assert torch.equal(module(IDS), twin(IDS))
        assert same(copies(module), copies(twin))
    assert module.head.weight is module.embed.weight
    for parameter in module.parameters():
        assert part.address <= parameter.data_ptr() < part.address + part.nbytes
        assert parameter.requires_grad
    for name, buffer in module.named_buffers():
        assert torch.equal(buffer, twin.get_buffer(name)), name


def test_buffers_stay_private_and_the_same_objects(client: Client, saved: Path) -> None:
    module = net(1)
    before = dict(module.named_buffers())
    client.load("net", saved, module)
    after = dict(module.named_buffers())
    assert all(after[name] is before[name] for name in before)
    module.norm.train()
    with client.acquire("net"):
        module(IDS)
    assert module.norm.num_batches_tracked == 1


def test_a_module_made_in_inference_mode_computes_there(client: Client, saved: Path) -> None:
    with torch.inference_mode():
        module, twin = net(1), net()
    client.load("net", saved, module)
    with client.acquire("net"), torch.inference_mode():
        assert torch.equal(module(IDS), twin(IDS))
        assert same(copies(module), copies(twin))


def test_a_default_device_of_torch_is_not_that_of_bytes_to_read(
    client: Client, saved: Path
) -> None:
    module, new = bare(), copies(net(1))
    with torch.device("meta"):  # as torch.set_default_device("cuda")
        client.load("net", saved, module)
        client.load("cast", saved, dtype=torch.float64)
    assert same(seen(client, "net", module), copies(net()))
    assert same(dict(module.named_buffers()), dict(net().named_buffers()))
    with torch.device("meta"):
        client.update("net", new)
    assert same(seen(client, "net", module), new)


def test_a_buffer_that_was_one_repeated_number_is_loaded(client: Client, tmp_path: Path) -> None:
    save_file({"weight": torch.ones(2, 2), "scale": torch.arange(4.0)}, tmp_path / "x.safetensors")
    module = nn.Linear(2, 2, bias=False)
    module.register_buffer("scale", torch.zeros(1).expand(4))
    client.load("x", tmp_path / "x.safetensors", module)
    assert module.get_buffer("scale").tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("name", ["first", "second"])
def test_a_module_that_is_there_twice_is_loaded_by_either_name(
    client: Client, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    state = net().norm.state_dict()
    save_file({f"{name}.{k}": v for k, v in state.items()}, tmp_path / "x.safetensors")
    module = nn.ModuleDict({"first": (norm := nn.BatchNorm1d(6)), "second": norm})
    client.load("x", tmp_path / "x.safetensors", module)
    with client.acquire("x"):
        assert same(norm.state_dict(), state)
    assert not caplog.text


def test_parameters_that_were_there_stay_the_same_objects(client: Client, saved: Path) -> None:
    module = net(1)
    before = list(module.parameters())
    client.load("net", saved, module)
    assert all(a is b for a, b in zip(before, module.parameters(), strict=True))


def test_what_a_parameter_knew_it_knows_afterwards(client: Client, saved: Path) -> None:
    module = bare()
    module.mix.weight.requires_grad_(False)
    module.mix.weight.note = "kept"  # type: ignore[attr-defined]
    client.load("net", saved, module)
    assert not module.mix.weight.requires_grad
    assert module.mix.weight.note == "kept"  # type: ignore[attr-defined]


def test_evicted_updated_and_closed_it_is_as_a_registered_one(
    daemon: spawn.Spawned, saved: Path
) -> None:
    module, twin = bare(), net()
    with swapd_client.connect(daemon.folder) as client:
        client.load("net", saved, module)
        client.register("other", {"x": bytes(60 << 20)})
        for _ in range(2):
            assert same(seen(client, "net", module), copies(twin))
            client.acquire("other").release()
        new = torch.randn(17, 6)
        client.update("net", {"head.weight": new})
        assert torch.equal(seen(client, "net", module)["embed.weight"], new)
    assert torch.equal(module.embed.weight, new)


def test_loading_inside_inference_mode_makes_no_inference_tensors(
    client: Client, saved: Path
) -> None:
    module = bare()
    with torch.inference_mode():
        client.load("net", saved, module)
    assert not any(p.is_inference() for p in module.parameters())


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda s: s.pop("mix.bias"), r"do not have mix\.bias"),
        (lambda s: s.pop("norm.running_var"), r"do not have norm\.running_var"),
        (lambda s: s.update({"mix.bias": torch.ones(7)}), r"'mix\.bias' has shape \(7,\)"),
        (lambda s: s.update({"norm.running_var": torch.ones(7)}), r"running_var.*\(7,\)"),
        (lambda s: s.update(mixed=s.pop("mix.weight")), r"mix\.weight.* also have mixed"),
    ],
)
def test_what_does_not_fit_is_named_and_changes_nothing(
    client: Client, tmp_path: Path, spoil: object, said: str
) -> None:
    state = net().state_dict()
    del state["head.weight"]
    spoil(state)  # type: ignore[operator]
    save_file(state, tmp_path / "bad.safetensors")
    module = bare()
    with pytest.raises(InvalidSource, match=said):
        client.load("net", tmp_path / "bad.safetensors", module)
    assert all(p.is_meta for p in module.parameters())
    assert client.status().components == ()


def test_what_the_module_has_no_place_for_is_said(
    client: Client, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_file({**net().mix.state_dict(), "lost": torch.ones(1)}, tmp_path / "x.safetensors")
    client.load("mix", tmp_path / "x.safetensors", nn.Linear(6, 6))
    assert "no place for lost" in caplog.text


def test_buffers_that_no_file_has_must_be_there(client: Client, saved: Path) -> None:
    with torch.device("meta"):
        module = Net()
    with pytest.raises(InvalidSource, match=r"meta device: table"):
        client.load("net", saved, module)


def test_parameters_that_cannot_be_loaded_are_refused(client: Client, saved: Path) -> None:
    with pytest.raises(InvalidSource, match="has no shape yet"):
        client.load("net", saved, nn.Sequential(nn.LazyLinear(3)))


def test_a_dtype_is_one_of_torch(client: Client, saved: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"dtype='bfloat16': .*torch\.bfloat16"):
        client.load("net", saved, dtype="bfloat16")  # type: ignore[arg-type]


def test_a_name_that_is_taken_leaves_the_module_as_it_was(client: Client, saved: Path) -> None:
    client.register("net", {"x": b"1"})
    module = bare()
    with pytest.raises(DuplicateName):
        client.load("net", saved, module)
    assert all(p.is_meta for p in module.parameters())


# --- without a module --------------------------------------------------------------------


def every_dtype() -> dict[str, torch.Tensor]:
    tensors = {
        name: torch.arange(-5, 6).to(dtype) if dtype.is_signed else torch.arange(11).to(dtype)
        for name, dtype in contents.DTYPES.items()
        if name != "F8_E8M0"
    }
    return {**tensors, "empty": torch.zeros(0, 3), "one": torch.tensor(3.0)}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def test_every_dtype_and_shape_comes_as_it_is(client: Client, tmp_path: Path) -> None:
    tensors = every_dtype()
    save_file(tensors, tmp_path / "x.safetensors")
    part = client.load("x", tmp_path)
    assert part.tensors.keys() == tensors.keys()
    with client.acquire("x"):
        for name, tensor in tensors.items():
            loaded = part.tensors[name]
            assert loaded.dtype == tensor.dtype
            assert loaded.shape == tensor.shape
            assert bits(loaded).equal(bits(tensor)), name


def test_numbers_are_cast_and_nothing_else(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contents, "_CAST_ITEMS", 3)
    tensors = every_dtype()
    save_file(tensors, tmp_path / "x.safetensors")
    part = client.load("x", tmp_path, dtype=torch.bfloat16)
    cast = {"F16", "BF16", "F32", "F64", "empty", "one"}
    with client.acquire("x"):
        for name, tensor in tensors.items():
            wanted = tensor.to(torch.bfloat16) if name in cast else tensor
            loaded = part.tensors[name]
            assert loaded.dtype == wanted.dtype, name
            assert bits(loaded).equal(bits(wanted)), name


def test_names_are_selected_shortened_and_changed(client: Client, tmp_path: Path) -> None:
    save_file({f"a.{i}": torch.full((2,), float(i)) for i in range(3)}, tmp_path / "x.safetensors")
    names = {"0": "zero", "1": "one"}
    part = client.load("x", tmp_path, prefix="a.", rename=names.get)
    with client.acquire("x"):
        assert {n: t[0].item() for n, t in part.tensors.items()} == {"zero": 0.0, "one": 1.0}
    with pytest.raises(InvalidSource, match="none begins with 'b'"):
        client.load("y", tmp_path, prefix="b")
    with pytest.raises(InvalidSource, match="would both be called 'same'"):
        client.load("y", tmp_path, rename=lambda _: "same")


def test_several_files_come_in_segments(client: Client, tmp_path: Path) -> None:
    weight_map = {}
    for i in range(3):
        save_file({f"l.{i}.w": torch.full((100 * KIB,), float(i))}, tmp_path / f"{i}.safetensors")
        weight_map[f"l.{i}.w"] = f"{i}.safetensors"
    (tmp_path / "m.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    part = client.load("x", tmp_path, segments=[["l.2"], ["l.0"], ["l.1"]])
    assert part.segments == 3
    with client.acquire("x", early=True) as lease:
        for i, number in enumerate((2, 0, 1)):
            lease.wait(i)
            assert part.tensors[f"l.{number}.w"].eq(number).all()
    with pytest.raises(InvalidSource, match="not loaded from files"):
        _ = client.register("raw", {"a": b"x"}).tensors


def test_mutable_components_may_be_loaded_and_written(client: Client, tmp_path: Path) -> None:
    save_file({"a": torch.zeros(4)}, tmp_path / "x.safetensors")
    part = client.load("x", tmp_path, mutable=True)
    with client.acquire("x"):
        part.tensors["a"].add_(1)
    other = client.load("y", tmp_path, mutable=True)
    with client.acquire("x", "y"):
        assert part.tensors["a"].eq(1).all()
        assert other.tensors["a"].eq(0).all()


def test_a_family_is_loaded_in_parts(client: Client, saved: Path) -> None:
    module, twin = bare(), net()
    parts = client.load_family("net", saved, {"rest": [], "mix": ["mix"]}, module)
    assert [part.name for part in parts] == ["net/rest", "net/mix"]
    with client.acquire("net"):
        assert torch.equal(module(IDS), twin(IDS))
    assert module.head.weight is module.embed.weight
    client.update("net", {"mix.bias": torch.ones(6)})
    with client.acquire("net"):
        assert module.mix.bias.eq(1).all()
    with pytest.raises(InvalidSource, match="none of the parts"):
        client.load_family("other", saved, {"mix": ["mix"]})
    with pytest.raises(InvalidSource, match="no tensor for nobody"):
        client.load_family("other", saved, {"rest": [], "nobody": ["nobody"]})


# --- reading -----------------------------------------------------------------------------


def test_progress_is_told_in_bytes_of_the_files(client: Client, saved: Path) -> None:
    told: list[tuple[int, int]] = []
    client.load("x", saved, progress=lambda done, total: told.append((done, total)))
    total = sum(t.nbytes for t in net().state_dict().values()) - 17 * 6 * 4
    assert [t for _, t in told] == [total] * len(told)
    assert [d for d, _ in told] == sorted(d for d, _ in told)
    assert told[-1] == (total, total)


def test_a_family_is_complete_once_and_at_its_end(daemon: spawn.Spawned, saved: Path) -> None:
    whole = sum(t.nbytes for t in load_file(saved).values())

    def load(client: Client, name: str) -> None:
        told: list[tuple[int, int]] = []
        parts: dict[str, list[str]] = {"embed": ["embed"], "mix": ["mix"], "rest": []}
        client.load_family(name, saved, parts, progress=lambda *at: told.append(at))
        assert {total for _, total in told} == {whole}
        assert [done for done, _ in told].index(whole) == len(told) - 1

    with swapd_client.connect(daemon.folder) as one, swapd_client.connect(daemon.folder) as two:
        load(one, "f")
        one.unregister("f/mix")
        load(two, "g")  # shares the other parts, and reads this one


def test_a_bar_is_shown_on_demand(
    client: Client, saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    client.load("x", saved)
    assert capsys.readouterr().err == "", "nobody looks"
    client.load("y", saved, prefix="mix.", progress=True)
    assert "loading" in capsys.readouterr().err


def test_a_process_without_a_stderr_loads(
    client: Client, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", None)  # as Python does if descriptor 2 is closed
    client.load("x", saved)


def test_file_systems_that_cannot_send_are_read(
    client: Client, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot(*_: object) -> int:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(os, "sendfile", cannot)
    module = bare()
    client.load("x", saved, module)
    assert same(seen(client, "x", module), copies(net()))


@pytest.mark.parametrize("how", ["cut", "changed"])
def test_a_file_that_changes_while_it_is_read_is_an_error(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    save_file({"a": torch.ones(100 * KIB)}, tmp_path / "x.safetensors")
    monkeypatch.setattr(contents, "_STEP_BYTES", 64 * KIB)

    def spoil(done: int, total: int) -> None:
        with (tmp_path / "x.safetensors").open("r+b") as file:
            if how == "cut":
                file.truncate(80 * KIB)
            else:
                file.write(b"x")

    with pytest.raises(InvalidSource, match="while it was read"):
        client.load("x", tmp_path, progress=spoil)
    assert client.status().components == ()
    await_host_copies(client, 0)


# --- shared ------------------------------------------------------------------------------


def test_a_second_process_shares_the_bytes(daemon: spawn.Spawned, saved: Path) -> None:
    with swapd_client.connect(daemon.folder) as one, swapd_client.connect(daemon.folder) as two:
        first, second = bare(), bare()
        part = one.load("a", saved, first)
        told: list[int] = []
        two.load("b", saved, second, progress=lambda done, _: told.append(done))
        assert told == [], "nothing was read"
        assert two.status().host_copy_bytes == part.nbytes
        assert same(seen(two, "b", second), copies(net()))
        two.update("b", {"mix.bias": torch.ones(6)})
        assert seen(two, "b", second)["mix.bias"].eq(1).all()
        assert same(seen(one, "a", first), copies(net())), "of the other nothing changed"
    assert second.mix.bias.eq(1).all()


def test_other_tensors_names_dtypes_or_bytes_are_not_shared(client: Client, saved: Path) -> None:
    client.load("a", saved)
    for name, how in {
        "prefix": {"prefix": "mix."},
        "dtype": {"dtype": torch.float64},
        "rename": {"rename": lambda name: f"x.{name}"},
        "mutable": {"mutable": True},
    }.items():
        before = client.status().host_copy_bytes
        part = client.load(name, saved, **how)  # type: ignore[arg-type]
        assert client.status().host_copy_bytes == before + part.nbytes, name
    copy = saved.with_name("copy.safetensors")
    copy.write_bytes(saved.read_bytes())
    before = client.status().host_copy_bytes
    part = client.load("copy", copy)
    assert client.status().host_copy_bytes == before + part.nbytes


@pytest.mark.parametrize("lost", ["unlinked", "replaced"])
def test_a_file_whose_name_goes_while_it_is_open_is_what_it_was(tmp_path: Path, lost: str) -> None:
    """As caches of models do it: a new file under the name, and the old one without any."""
    path = tmp_path / "model.safetensors"
    save_file({"w": torch.zeros(8)}, path)
    with closing(File(path)) as opened:
        if lost == "unlinked":
            path.unlink()
        else:
            save_file({"w": torch.ones(8)}, tmp_path / "new")
            (tmp_path / "new").replace(path)
        opened.check_unchanged()


def test_a_file_that_was_written_and_unlinked_has_changed(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"w": torch.zeros(8)}, path)
    with closing(File(path)) as opened:
        with path.open("ab") as file:
            file.write(b"more")
        path.unlink()
        with pytest.raises(swapd_client.InvalidSource, match="changed while it was read"):
            opened.check_unchanged()
