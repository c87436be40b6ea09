"""A conversion rounds once, moves coded weights unchanged, and goes on after a kill."""

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from colibri.checkpoint.container import open_container
from colibri.checkpoint.container_file import PartFile
from colibri.checkpoint.conversion import Conversion, ExpertFormats
from colibri.checkpoint.convert import ConvertProgress, ConvertReport, _Job, convert, in_order
from colibri.checkpoint.expert_bytes import read_expert
from colibri.checkpoint.experts import ExpertIndex, ExpertLayer, index_experts
from colibri.checkpoint.index import Checkpoint
from colibri.checkpoint.recode import DenseParameter
from colibri.checkpoint.rename import Census
from colibri.checkpoint.safetensors import read_tensor
from colibri.checkpoint.safetensors_writer import save_hf
from colibri.errors import (
    CheckpointError,
    IncompleteModelError,
    NumericsError,
    UnsupportedModelError,
    WriteError,
)
from colibri.formats import F32, FORMATS, Format, get_format

D, F, E, LAYERS = 64, 32, 3, (0, 2)
PREFIX = "model.layers.{}.mlp.experts"
REQUESTS = [ExpertLayer(layer, PREFIX.format(layer), E, D, F) for layer in LAYERS]
INT4, INT8 = get_format("int4-g64"), get_format("int8-g32")
SHAPES = {"gate_proj": (F, D), "up_proj": (F, D), "down_proj": (D, F)}


def tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    found = {"embed.weight": rng.standard_normal((16, D), np.float32)}
    for layer in LAYERS:
        for expert in range(E):
            for name, shape in SHAPES.items():
                key = f"{PREFIX.format(layer)}.{expert}.{name}.weight"
                found[key] = rng.standard_normal(shape, np.float32)
    return found | {"norm.weight": rng.standard_normal(D, np.float32)}


def write_source(directory: Path, weights: dict[str, np.ndarray] | None = None) -> Path:
    save_hf(directory, {"hidden_size": D}, weights or tensors(), shards=3)
    (directory / "tokenizer.json").write_text("{}")
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    (directory / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    return directory


def parts_of(checkpoint: Checkpoint, embedding: Format) -> tuple[ExpertIndex, list[DenseParameter]]:
    census, container = Census(checkpoint.tensors), checkpoint.container
    index = container.expert_index(REQUESTS) if container else index_experts(census, REQUESTS)
    dense = []
    for name, shape, fmt in (("embed.weight", (16, D), embedding), ("norm.weight", (D,), F32)):
        stored = container.dense[name][0] if container else F32
        dense.append(DenseParameter(name, shape, checkpoint.tensors[name], stored, fmt))
    return index, dense


class Told(list[ConvertProgress]):
    """Keeps what a conversion tells, and interrupts it after some of it."""

    def __init__(self, stop_after: int | None = None) -> None:
        super().__init__()
        self.stop_after = stop_after

    def __call__(self, progress: ConvertProgress) -> None:
        self.append(progress)
        if len(self) == self.stop_after:
            raise KeyboardInterrupt


def run(
    source: Path,
    destination: Path,
    experts: Format | None = INT4,
    embedding: Format = INT8,
    told: Told | None = None,
) -> ConvertReport:
    return convert(plan(source, experts, embedding), destination, progress=told)


def plan(source: Path, experts: Format | None = INT4, embedding: Format = INT8) -> Conversion:
    checkpoint = Checkpoint.open(source)
    index, dense = parts_of(checkpoint, embedding)
    formats = ExpertFormats(experts)
    return Conversion.of(checkpoint, index, dense, family="any", formats=formats)


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_source(tmp_path_factory.mktemp("source"))


@pytest.fixture(scope="module")
def converted(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    destination = tmp_path_factory.mktemp("converted") / "model"
    run(source, destination)
    return destination


@pytest.mark.parametrize("fmt", [None, *FORMATS.values()], ids=str)
def test_every_weight_is_rounded_once(fmt: Format | None, source: Path, tmp_path: Path) -> None:
    run(source, tmp_path / "to", fmt, fmt or F32)
    checkpoint = Checkpoint.open(tmp_path / "to")
    index, _ = parts_of(checkpoint, F32)
    weights, target = tensors(), fmt or F32
    for layout in index.layers:
        for expert in range(E):
            found = read_expert(index, layout, expert)
            for name, data in zip(SHAPES, found, strict=True):
                matrix = weights[f"{PREFIX.format(layout.layer)}.{expert}.{name}.weight"]
                wanted = target.pack(target.encode(matrix), matrix.shape)
                assert data.tobytes() == wanted.tobytes()
    embedding = target.pack(target.encode(weights["embed.weight"]), (16, D))
    assert read_tensor(checkpoint.tensors["embed.weight"]).tobytes() == embedding.tobytes()
    norm = read_tensor(checkpoint.tensors["norm.weight"]).view(np.float32)
    assert norm.tobytes() == weights["norm.weight"].tobytes()


def test_companions_come_along(source: Path, converted: Path) -> None:
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (converted / name).read_bytes() == (source / name).read_bytes()
    assert Checkpoint.open(converted).config == {"hidden_size": D}


def test_what_is_coded_moves_unchanged(converted: Path, tmp_path: Path) -> None:
    run(converted, tmp_path / "again", experts=None)
    for name in ("experts-00000.safetensors", "experts-00002.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (converted / name).read_bytes()


def test_nothing_is_rounded_twice(converted: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="int4-g64 and would be rounded a second time"):
        run(converted, tmp_path / "to", experts=INT8)
    with pytest.raises(UnsupportedModelError, match=r"embed\.weight is int8-g32"):
        run(converted, tmp_path / "other", embedding=INT4)
    assert not list(tmp_path.iterdir())  # refused before the first expert is written


def test_progress_ends_at_the_total(source: Path, tmp_path: Path) -> None:
    told = Told()
    report = run(source, tmp_path / "to", told=told)
    done = [progress.done_bytes for progress in told]
    assert done == sorted(done)
    assert done[-1] == told[-1].total_bytes < report.total_bytes  # which counts headers
    assert (report.num_layers, report.num_kept_layers) == (2, 0)


@pytest.mark.parametrize("stop_after", range(1, 9))
def test_an_interrupted_conversion_goes_on(
    stop_after: int, source: Path, converted: Path, tmp_path: Path
) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(source, tmp_path / "to", told=Told(stop_after))
    with pytest.raises(IncompleteModelError):
        open_container(tmp_path / "to")
    report = run(source, tmp_path / "to")
    # After the last expert of a layer its file is closed only once the layer's block has ended.
    assert report.num_kept_layers == (stop_after - 1) // E
    assert contents(tmp_path / "to") == contents(converted)


def test_a_killed_conversion_goes_on(source: Path, converted: Path, tmp_path: Path) -> None:
    script = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from tests.unit.checkpoint.test_convert import Told, run\n"
        "class Killed(Told):\n"
        "    def __call__(self, progress):\n"
        "        if self.append(progress) or len(self) == 5:\n"
        "            os.kill(os.getpid(), signal.SIGKILL)\n"
        f"run(Path({os.fspath(source)!r}), Path({os.fspath(tmp_path / 'to')!r}), told=Killed())\n"
    )
    root = Path(__file__).parents[3]
    killed = subprocess.run([sys.executable, "-c", script], cwd=root, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert list((tmp_path / "to").glob("*.part"))
    report = run(source, tmp_path / "to")
    assert report.num_kept_layers == 1
    assert contents(tmp_path / "to") == contents(converted)


KILLED_ANYWHERE = """
import os, random, signal, sys
from pathlib import Path
from colibri.checkpoint.container_file import PartFile
from tests.unit.checkpoint.test_convert import run

source, folder, total = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
put, left = PartFile._put, 0

def killing(self, data):
    global left
    left -= data.nbytes
    if left < 0:
        put(self, data[: max(0, data.nbytes + left)])
        os.kill(os.getpid(), signal.SIGKILL)
    put(self, data)

for seed in range(20):
    left = random.Random(seed).randrange(total)
    if (child := os.fork()) == 0:
        PartFile._put = killing
        run(source, folder / str(seed))
        os._exit(0)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1]), seed
    run(source, folder / str(seed))
"""


def test_killed_at_any_byte_and_resumed_gives_the_same_files(
    source: Path, converted: Path, tmp_path: Path
) -> None:
    total = sum(path.stat().st_size for path in converted.glob("*.safetensors"))
    command = [sys.executable, "-c", KILLED_ANYWHERE, str(source), str(tmp_path), str(total)]
    root = Path(__file__).parents[3]
    result = subprocess.run(command, cwd=root, check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    for seed in range(20):
        assert contents(tmp_path / str(seed)) == contents(converted), seed


def test_a_source_that_changes_meanwhile_leaves_nothing_that_looks_complete(
    tmp_path: Path,
) -> None:
    source = write_source(tmp_path / "from")

    class Touching(Told):
        def __call__(self, progress: ConvertProgress) -> None:
            super().__call__(progress)
            if len(self) == 2:
                os.utime(sorted(source.glob("*.safetensors"))[-1], ns=(0, 0))

    with pytest.raises(CheckpointError, match="its files changed while they were converted"):
        run(source, tmp_path / "to", told=Touching())
    with pytest.raises(IncompleteModelError):
        Checkpoint.open(tmp_path / "to")


@pytest.mark.parametrize("after", [0, 1000, 30000])
def test_a_full_disk_is_named_and_can_be_gone_on_from(
    after: int, source: Path, converted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, put = after, PartFile._put

    def filling(self: PartFile, data: np.ndarray) -> None:
        nonlocal left
        left -= data.nbytes
        if left < 0:
            raise OSError(28, "No space left on device", str(self.path))
        put(self, data)

    with monkeypatch.context() as patch:
        patch.setattr(PartFile, "_put", filling)
        with pytest.raises(WriteError, match="cannot be written: No space left on device"):
            run(source, tmp_path / "to")
    assert not list((tmp_path / "to").glob("*.part"))
    with pytest.raises(IncompleteModelError):
        Checkpoint.open(tmp_path / "to")
    run(source, tmp_path / "to")
    assert contents(tmp_path / "to") == contents(converted)


def test_two_conversions_into_one_directory_are_kept_apart(source: Path, tmp_path: Path) -> None:
    class Another(Told):
        def __call__(self, progress: ConvertProgress) -> None:
            if not self:
                self.append(progress)
                with pytest.raises(CheckpointError, match="another conversion is writing here"):
                    run(source, tmp_path / "to")

    told = Another()
    run(source, tmp_path / "to", told=told)
    assert told


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_workers_keep_the_order(workers: int) -> None:
    under_way: list[int] = []

    def task(number: int) -> int:
        under_way.append(number)
        return number

    results = in_order((partial(task, number) for number in range(20)), workers)
    found = []
    for result in results:
        found.append(result)
        assert len(under_way) - len(found) <= workers + 1
    assert found == list(range(20))


def test_memory_bounds_the_number_of_workers(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("colibri.checkpoint.convert._MEMORY_BYTES", 1)
    assert _Job(plan(source), "", None)._workers() == 1


def test_a_changed_source_is_not_continued(tmp_path: Path) -> None:
    source = write_source(tmp_path / "from")
    with pytest.raises(KeyboardInterrupt):
        run(source, tmp_path / "to", told=Told(4))
    shard = sorted(source.glob("*.safetensors"))[0]
    os.utime(shard, ns=(0, 0))
    with pytest.raises(CheckpointError, match="unfinished conversion"):
        run(source, tmp_path / "to")


def test_a_destination_in_use_is_left_alone(source: Path, converted: Path, tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(CheckpointError, match="holds other files"):
        run(source, tmp_path)
    assert contents(tmp_path) == {"letter.txt": b"dear"}
    with pytest.raises(CheckpointError, match="finished container"):
        run(source, converted)


def test_a_weight_that_is_not_finite_is_named(tmp_path: Path) -> None:
    weights = tensors()
    weights[f"{PREFIX.format(2)}.1.up_proj.weight"][3, 5] = np.inf
    source = write_source(tmp_path / "from", weights)
    with pytest.raises(NumericsError, match=r"layer 2, expert 1, up_proj: weight \[3, 5\]"):
        run(source, tmp_path / "to")


def test_a_source_that_shrinks_is_named(tmp_path: Path) -> None:
    source = write_source(tmp_path / "from")
    conversion = plan(source)
    for path in conversion.files:
        os.truncate(path, 1000)
    with pytest.raises(IncompleteModelError, match="changed meanwhile"):
        convert(conversion, tmp_path / "to")
