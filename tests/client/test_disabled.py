"""Without swapd (`disabled=True`, $SWAPD_DISABLE) a program has the results that it has with it."""

import asyncio
import gc
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from swapd import spawn
from swapd.shared import protocol
from swapd_client import (
    AsyncClient,
    Client,
    ClientClosed,
    DeviceFailed,
    DuplicateName,
    InUse,
    InvalidArgument,
    InvalidSource,
    SwapdError,
    UnknownComponent,
    connect,
    connect_async,
    finalizers,
)
from swapd_client.memory import dlpack
from swapd_client.memory.layout import RemoteBytes
from tests.client.test_tensors import on_gpu
from tests.offload.modules import Model
from tests.processes import PYTHONPATH

MIB = 1 << 20


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """No daemon can be found or started."""
    with tempfile.TemporaryDirectory(prefix="sw-") as made:
        monkeypatch.setenv("XDG_RUNTIME_DIR", made)
        monkeypatch.delenv("SWAPD_ENDPOINT", raising=False)
        yield Path(made)


def mlp(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)])


def first(model: nn.Sequential) -> nn.Linear:
    layer = model[0]
    assert isinstance(layer, nn.Linear)
    return layer


def code(call: Callable[[], object]) -> str:
    """The kind of error that a call raises; "" if it raises none."""
    try:
        call()
    except SwapdError as exc:
        return type(exc).__name__
    return ""


# --- the same in both modes --------------------------------------------------------------


def registers(client: Client, tmp_path: Path) -> list[Any]:
    model, x = mlp(), torch.ones(1, 16)
    part = client.register("mlp", model, segments=[["0"], ["1"], ["2", "3"]])
    found: list[Any] = [part.name, part.nbytes, part.segments, part.mutable]
    with client.acquire("mlp", early=True) as lease:
        lease.wait(0)
        lease.wait(2, name="mlp")
        lease.wait()
        lease.uses(0)
        lease.rests()
        lease.check()
        found += [model(x).tolist(), lease.names, lease.held, lease.wanted]
        found += [code(lambda: client.unregister("mlp")), code(lambda: client.evict("mlp"))]
    client.prefetch("mlp")
    client.follows("mlp", after="later")
    client.pin("mlp")
    client.unpin("mlp")
    client.evict("mlp")
    found += [one.names for one in client.cheapest(["mlp"])]
    found += [client.forecast("mlp").at_once]
    (shown,) = client.status().components
    found += [shown.name, shown.policy, shown.leases, shown.nbytes]
    client.unregister("mlp")
    return [*found, model(x).tolist(), client.status().components]


def keeps_scratch(client: Client, tmp_path: Path) -> list[Any]:
    kv = client.register_scratch("kv", "1MiB", mutable=True)
    plain = client.register("bytes", {"a": b"hello", "b": b"old"}, mutable=True)
    found: list[Any] = []
    with client.acquire("kv", "bytes") as lease:
        found += [lease.fresh("bytes"), lease.fresh("kv"), code(lambda: lease.fresh("other"))]
        found += [int(kv.tensor.sum())]
        kv.tensor[:10] = 7
        kv.used([(0, 10)])
        plain.view("b")[:] = b"new"
    with client.acquire("kv", "bytes") as lease, client.acquire_workspace("1MiB"):
        found += [lease.fresh("kv"), kv.tensor[:12].tolist()]
        found += [bytes(plain.view("a")), bytes(plain.view("b")), kv.lost]
    with client.acquire_start():
        client.unregister("kv")
    return [*found, kv.tensor[:12].tolist(), code(lambda: plain.tensors)]


def updates(client: Client, tmp_path: Path) -> list[Any]:
    model, x = mlp(), torch.ones(1, 16)
    tied = {"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)}
    tied["b"].weight = tied["a"].weight
    client.register("mlp", model)
    client.register("tied", nn.ModuleDict(tied))
    client.register("bytes", {"a": b"old"})
    client.update("mlp", mlp(seed=1).state_dict())
    client.update("tied", {"b.weight": torch.ones(4, 4)})
    client.update("bytes", {"a": b"new"})
    wrong: list[dict[str, Any]] = [{"0.none": x}, {"0.bias": torch.ones(3)}, {"0.bias": 1}]
    found: list[Any] = [code(lambda v=v: client.update("mlp", v)) for v in wrong]  # type: ignore[misc]
    with client.acquire("mlp", "tied"):
        return [*found, model(x).tolist(), tied["a"].weight.tolist()]


def loads(client: Client, tmp_path: Path) -> list[Any]:
    save_file(dict(mlp(seed=2).state_dict()), tmp_path / "m.safetensors")
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)])
    client.load("files", tmp_path, model)
    loose = client.load("loose", tmp_path / "m.safetensors", dtype=torch.bfloat16)
    parts = client.load_family("family", tmp_path, {"first": ["0"], "rest": []}, resident="1MiB")
    client.resize("family", None)
    found: list[Any] = [part.name for part in parts]
    with client.acquire("files", "loose", "family") as lease:
        found += [sorted(place.name for place in lease.placements)]
        found += [code(lambda: client.evict("family")), code(lambda: client.unregister("family"))]
        found += [model(torch.ones(1, 16)).tolist(), sorted(loose.tensors), loose.tensors["0.bias"]]
        found[-1] = found[-1].tolist()
        found += [parts[0].tensors["0.weight"].tolist()]
    client.update("loose", {"0.bias": torch.zeros(16, dtype=torch.bfloat16)})
    with client.acquire("loose"):
        found += [loose.tensors["0.bias"].tolist()]
    return [*found, code(lambda: client.resize("loose", None))]


def refuses(client: Client, tmp_path: Path) -> list[Any]:
    model = mlp()
    client.register("mlp", model)
    for turn in ("turn 0", "turn 1"):
        client.register(turn, mlp(), policy="alternating", group="g")
    turns = {"a": mlp(), "b": mlp()}
    client.register_family("turns", turns, policy="alternating", group="of a family")
    client.acquire("turns").release()
    calls: list[Callable[[], object]] = [
        lambda: client.acquire("lmp"),
        lambda: client.acquire(),
        lambda: client.acquire(["mlp"]),  # type: ignore[arg-type]
        lambda: client.acquire("mlp", timeout="soon"),  # type: ignore[arg-type]
        lambda: client.forecast("lmp"),
        lambda: client.prefetch("lmp"),
        lambda: client.pin("lmp"),
        lambda: client.unpin("lmp"),
        lambda: client.evict("lmp"),
        lambda: client.unregister("lmp"),
        lambda: client.resize("mlp", 1),
        lambda: client.update("lmp", {}),
        lambda: client.forget("mlp"),
        lambda: client.register("mlp", mlp()),
        lambda: client.register("part", mlp(), part_of="mlp"),
        lambda: client.register_family("mlp", {"part": mlp()}),
        lambda: client.register("again", model),
        lambda: client.register("view", {"w": first(model).weight.detach()[1:]}),
        lambda: client.register("nothing", 3),  # type: ignore[arg-type]
        lambda: client.register("policy", mlp(), policy="mru"),  # type: ignore[arg-type]
        lambda: client.register("segments", mlp(), segments=[["0"], ["no such"]]),
        lambda: client.register_scratch("none", 0),
        lambda: client.load("missing", tmp_path / "missing"),
        lambda: client.attach(mlp(), "no_such_component"),
        lambda: client.register("", mlp()),
        lambda: client.register("two\nlines", mlp()),
        lambda: client.register("workspace 1", mlp()),
        lambda: client.register("itself", mlp(), part_of="itself"),
        lambda: client.register("no group", mlp(), policy="alternating"),
        lambda: client.register("no turns", mlp(), group="g"),
        lambda: client.acquire("", await_registration=True),
        lambda: client.acquire("turn 0", "turn 1"),
        lambda: client.acquire("mlp", priority=1.5),  # type: ignore[arg-type]
        lambda: client.acquire("mlp", overtake=-1),
        lambda: client.acquire_workspace(0),
        lambda: client.acquire_workspace(1.5),  # type: ignore[arg-type]
        lambda: client.prefetch(),
        lambda: client.prefetch("mlp", over=[""]),
        lambda: client.follows("mlp", after="mlp"),
        lambda: client.resize("turns", -1),
        lambda: client.register(["mlp"], mlp()),  # type: ignore[arg-type]
        lambda: client.register("segments", mlp(), segments=5),  # type: ignore[arg-type]
        lambda: client.unregister(["mlp"]),  # type: ignore[arg-type]
        lambda: client.cheapest(5),  # type: ignore[arg-type]
        lambda: client.pin(7),  # type: ignore[arg-type]
    ]
    found = [code(call) for call in calls]
    with client.acquire("mlp"):
        found += [code(client.acquire_start)]
        return [*found, model(torch.ones(1, 16)).tolist()]


def attaches(client: Client, tmp_path: Path) -> list[Any]:
    torch.manual_seed(0)
    model, x = Model(), torch.ones(1, 4, dtype=torch.long)
    attachment = client.attach(model)
    found: list[Any] = [sorted(attachment.components)]
    found += [model.vae(model.text_encoder(x)).tolist()]
    with attachment.use("vae"), attachment.edit("vae"):
        model.vae.out.bias.data.fill_(2.0)
    model.text_encoder.load_state_dict(model.text_encoder.state_dict())
    found += [model.vae(model.text_encoder(x)).tolist(), sorted(model.state_dict())]
    attachment.refresh()
    attachment.detach()
    return [*found, model.vae(model.text_encoder(x)).tolist(), client.status().components]


def test_a_wrong_name_is_refused_in_the_words_of_a_client_with_swapd() -> None:
    with connect(disabled=True) as client:
        wrong: Any = ["mlp"]
        for call in (client.pin, client.prefetch, client.forecast):
            with pytest.raises(InvalidArgument, match=r"^name=\['mlp'\]: give "):
                call(wrong)


@pytest.mark.parametrize(
    "program",
    [registers, keeps_scratch, updates, loads, refuses, attaches],
    ids=lambda p: p.__name__,
)
def test_a_program_has_the_same_results_with_swapd_and_without(
    program: Callable[[Client, Path], list[Any]], tmp_path: Path, nowhere: Path
) -> None:
    with spawn.daemon(budget="32MiB") as daemon, torch.inference_mode(program is attaches):
        with connect(daemon.folder) as client:
            expected = program(client, tmp_path)
        with connect(disabled=True) as client:
            assert program(client, tmp_path) == expected


async def shown(client: AsyncClient) -> list[str]:
    """The components; the memory of a workspace is there for a moment after its release."""
    return [one.name for one in (await client.status()).components if one.kind != "workspace"]


async def served(client: AsyncClient) -> list[Any]:
    model, x = mlp(), torch.ones(1, 16)
    async with client:
        await client.register("mlp", model, segments=[["0"]])
        kv = await client.register_scratch("kv", 4096)
        async with client.acquire("mlp", "kv", early=True) as lease:
            await lease.wait(0)
            await lease.wait()
            found: list[Any] = [model(x).tolist(), lease.fresh("kv"), int(kv.tensor.sum())]
        lease = await client.acquire("mlp")
        with pytest.raises(InUse):
            await client.unregister("mlp")
        lease.release()
        with pytest.raises(UnknownComponent):
            await client.acquire("lmp")
        async with client.acquire_start():
            pass
        async with client.acquire_workspace("1MiB"):
            found += [(await client.forecast("mlp")).at_once]
        await client.update("mlp", mlp(seed=1).state_dict())
        await client.prefetch("mlp")
        async with client.acquire("mlp"):
            found += [model(x).tolist(), await shown(client)]
        await client.unregister("kv")
    return [*found, model(x).tolist()]


async def test_an_asyncio_service_has_the_same_results_with_swapd_and_without(
    nowhere: Path,
) -> None:
    with spawn.daemon(budget="32MiB") as daemon:
        expected = await served(await connect_async(daemon.folder))
    assert await served(await connect_async(disabled=True)) == expected


def test_a_client_that_is_lost_with_its_loop_leaves_nothing_open(nowhere: Path) -> None:
    def lose() -> None:
        asyncio.run(connect_async(disabled=True))
        finalizers.settle()

    lose()  # the first one starts threads
    before = len(os.listdir("/proc/self/fd"))
    lose()
    assert len(os.listdir("/proc/self/fd")) == before


# --- without swapd -----------------------------------------------------------------------


def seen(module: nn.Module) -> list[Any]:
    """All attributes of the modules in a module, its parameters, and their values."""
    attributes = [sorted(vars(one)) for one in module.modules()]
    hooks = [len(one._forward_pre_hooks) + len(one._forward_hooks) for one in module.modules()]
    return [attributes, hooks, [(id(p), p.tolist()) for p in module.parameters()]]


def addresses(*modules: nn.Module) -> list[int]:
    return [p.data_ptr() for module in modules for p in module.parameters()]


def test_tensors_keep_their_private_memory_and_an_attached_model_gets_no_hooks(
    nowhere: Path,
) -> None:
    model, registered = Model(), mlp()
    before = seen(model), seen(registered)
    with connect(disabled=True, start=True, budget="1MiB") as client:
        assert "no daemon" in repr(client)
        client.register("mlp", registered)
        client.attach(model, resident={"transformer": 0})
        assert (seen(model), seen(registered)) == before
        component, moved = client.session.own("mlp"), addresses(model, registered)
        start, end = component.address, component.address + component.nbytes
        assert all(start <= address < end for address in addresses(registered))
        if not (child := os.fork()):
            first(registered).weight.data.fill_(7.0)  # in its own copy
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        status = client.status()
        assert protocol.decode_reply(protocol.encode(status)) == status, "all of it has its type"
        (note,) = status.notes
        assert "disabled" in note
        client.unregister("mlp")
    assert (seen(model), seen(registered)) == before
    assert addresses(model, registered) == moved, "all of it is private memory already"
    assert not list(nowhere.iterdir()), "no daemon was started"


def test_a_model_is_attached_for_as_long_as_it_lives(nowhere: Path) -> None:
    with connect(disabled=True) as client:
        for _ in range(2):
            model = {"one": mlp(), "two": mlp()}
            client.attach(model)
            del model["one"]
            gc.collect()
            client.acquire("one", "two").release()
            del model
            finalizers.settle()
            assert client.status().components == ()


def test_clients_of_one_process_know_the_names_of_each_other(nowhere: Path) -> None:
    with connect(disabled=True) as owner, connect(disabled=True) as user:
        part = owner.register("a", {"x": b"there"})
        with user.acquire("a") as lease:
            assert lease.placements == ()
            assert bytes(part.view("x")) == b"there"
            for use in (owner.unregister, owner.evict):
                with pytest.raises(InUse):
                    use("a")
        with pytest.raises(DuplicateName):
            user.register("a", {"x": b"again"})
        with pytest.raises(UnknownComponent, match=r"swapd is disabled; registered: a\."):
            user.acquire("A")
        user.acquire("of another process", await_registration=True).release()
        owner.close()
        with pytest.raises(UnknownComponent):
            user.acquire("a")
        with pytest.raises(ClientClosed):
            owner.acquire("a")


def test_leases_of_threads_that_have_ended_keep_nothing_in_use(nowhere: Path) -> None:
    with connect(disabled=True) as client:
        client.register("a", {"x": b"1"})

        async def uses() -> None:
            await asyncio.gather(*[asyncio.to_thread(use) for _ in range(4)])

        def use() -> None:
            for _ in range(3):
                client.acquire("a").release()

        asyncio.run(uses())
        client.unregister("a")


def test_values_for_tensors_that_are_no_more_are_dropped(nowhere: Path) -> None:
    with connect(disabled=True) as client:
        client.register("gone", {"x": torch.ones(4)})  # its memory went with its last tensor
        client.update("gone", {"x": torch.zeros(4)})
        client.acquire("gone").release()


def test_nothing_of_a_part_that_fails_is_registered(nowhere: Path) -> None:
    with connect(disabled=True) as client:
        shared = mlp()
        with pytest.raises(InvalidSource):
            client.register_family("f", {"one": shared, "two": {"w": first(shared).weight}})
        assert client.status().components == ()
        client.register_family("f", {"one": shared})


# --- on a GPU ----------------------------------------------------------------------------


def test_a_gpu_that_torch_does_not_see_is_an_error_and_the_tensors_stay(
    nowhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = mlp()
    before = seen(model), addresses(model)
    monkeypatch.setenv("SWAPD_DEVICE", "cuda:7")
    for client in (connect("cuda:7", disabled=True), connect(disabled=True)):
        with client, pytest.raises(DeviceFailed, match=r"cuda:7 has no 8 KiB for torch: "):
            client.register("mlp", model)
        client.close()
    assert (seen(model), addresses(model)) == before
    monkeypatch.setenv("SWAPD_DEVICE", "gpu")
    with pytest.raises(InvalidArgument, match="give a device"):
        connect(disabled=True)


def test_what_is_made_for_a_gpu_is_in_memory_of_torch_and_outlives_its_component(
    nowhere: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU whose memory is the host's: torch has no other here."""
    monkeypatch.setattr(dlpack, "gpu", lambda index: dlpack.HOST)
    save_file(dict(mlp(seed=2).state_dict()), tmp_path / "m.safetensors")
    with connect("cuda:0", disabled=True) as client:
        assert client.status().device == "cuda:0"
        loaded = client.load("files", tmp_path)
        kv = client.register_scratch("kv", 4096)
        model = mlp()
        client.register("mlp", model)
        with client.acquire("files", "kv", "mlp"):
            kv.tensor[:4] = 9
        client.update("files", {"0.bias": torch.ones(16)})
        client.update("mlp", {"0.bias": torch.ones(16)})
        plain = client.register("bytes", {"x": b"1"})
        with client.acquire("bytes"), pytest.raises(InvalidSource, match="CPU cannot read"):
            plain.view("x")
        weight = loaded.tensors["0.weight"]
        assert torch.equal(loaded.tensors["0.bias"], first(model).bias)
        for name in ("files", "kv", "mlp"):
            client.unregister(name)
    del loaded
    gc.collect()
    torch.full((1 << 16,), 5.0)  # would reuse the memory
    assert torch.equal(weight, first(mlp(seed=2)).weight)
    assert kv.tensor[:5].tolist() == [9, 9, 9, 9, 0]


def test_a_tensor_on_a_gpu_is_refused_if_no_gpu_is_named_and_the_error_says_how(
    nowhere: Path,
) -> None:
    with (
        connect(disabled=True) as client,
        pytest.raises(
            InvalidSource, match=r"call \.cpu\(\), or name the device: connect\('cuda:1'\)"
        ),
    ):
        client.register("w", {"w": on_gpu("cuda:1")})


def test_bytes_on_a_gpu_are_read_after_its_work(
    nowhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU whose memory is the host's, as above."""
    waited: list[int] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    monkeypatch.setattr(dlpack, "gpu", lambda index: dlpack.HOST)
    source, target = torch.arange(64), torch.zeros(64, dtype=torch.int64)
    with connect("cuda:1", disabled=True) as client:
        client.session.processor.fetch(
            [RemoteBytes(target.data_ptr(), source.data_ptr(), source.nbytes)]
        )
    assert torch.equal(target, source)
    assert waited == [1]


# --- the variable ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "disabled"), [("1", True), ("True", True), ("0", False), ("false", False), ("", False)]
)
def test_the_variable_switches_swapd_off_unless_the_call_says(
    said: str,
    disabled: bool,
    nowhere: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("SWAPD_DISABLE", said)
    with caplog.at_level(logging.WARNING, "swapd_client"), spawn.daemon(budget="2MiB") as daemon:
        with connect(daemon.folder) as client:
            assert (client.status().budget_bytes == 0) is disabled
        assert ("as $SWAPD_DISABLE says" in caplog.text) is disabled
        with connect(daemon.folder, disabled=False) as client:
            assert client.status().budget_bytes == 2 * MIB
        with connect(daemon.folder, disabled=True) as client:
            assert client.status().budget_bytes == 0


def test_a_value_that_is_none_is_an_error_that_says_which_are(
    nowhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidArgument, match="disabled='0': give True, False or None"):
        connect(disabled="0")  # type: ignore[arg-type]
    monkeypatch.setenv("SWAPD_DISABLE", "yes")
    with pytest.raises(InvalidArgument, match=r"\$SWAPD_DISABLE is 'yes': 1 or true does without"):
        connect()
    monkeypatch.setenv("SWAPD_DEVICE", "gpu0")
    with pytest.raises(InvalidArgument, match=r"^\$SWAPD_DEVICE is 'gpu0': give a device"):
        connect(disabled=True)
    with pytest.raises(InvalidArgument, match="the label is"):
        connect(disabled=True, label="two\nlines")
    with pytest.raises(InvalidArgument, match="names two devices"):
        connect("cuda:0", device="host", disabled=True)


def test_commands_ask_the_daemon_and_a_daemon_serves_whatever_the_variable_says(
    nowhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWAPD_DISABLE", "1")
    with spawn.daemon(budget="2MiB") as daemon:
        words = [sys.executable, "-m", "swapd", "status", "--json", "-e", str(daemon.folder)]
        environment = {**os.environ, "PYTHONPATH": PYTHONPATH}  # noqa: TID251
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
        assert f'"budget_bytes":{2 * MIB}' in done.stdout.replace(" ", "")


def test_the_first_program_of_the_readme_runs_without_a_daemon(nowhere: Path) -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    (program,) = [part for part in readme.split("```python\n")[1:] if "swapd.connect()" in part]
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH, "SWAPD_DISABLE": "1"}  # noqa: TID251
    words = [sys.executable, "-c", program.partition("```")[0]]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "0 evictions, 0 bytes copied back\n"
    assert "without swapd" in done.stderr
