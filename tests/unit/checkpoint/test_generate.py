"""Random checkpoints: seeded, sane, every expert its own, in any spelling and format."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri.checkpoint.byte_tokenizer import NUM_TOKENS, SPECIAL, write_byte_tokenizer
from colibri.checkpoint.container import open_container
from colibri.checkpoint.expert_bytes import read_expert
from colibri.checkpoint.experts import ExpertIndex, ExpertLayer, index_experts
from colibri.checkpoint.generate import SPELLINGS, RandomModel, RandomTensor, generate_checkpoint
from colibri.checkpoint.index import INDEX_NAME, Checkpoint
from colibri.checkpoint.quantization import Quantization
from colibri.checkpoint.random_weights import RandomExperts, random_matrix, resident_draw
from colibri.checkpoint.record import RecordLayout
from colibri.checkpoint.rename import Census
from colibri.checkpoint.safetensors import read_tensor
from colibri.checkpoint.storage import take_matrix
from colibri.errors import CheckpointError, IncompleteModelError, UnsupportedModelError
from colibri.formats import BF16, F32, FORMATS, Format, IntegerFormat, get_format

D, F, E = 64, 32, 10
INT4, INT8 = get_format("int4-g64"), get_format("int8-g32")
LAYERS = [ExpertLayer(i, f"model.layers.{i}.mlp.experts", E, D, F) for i in (0, 3)]


def model(experts: Format, seed: int = 0, spelling: str | None = "per-expert") -> RandomModel:
    dense = experts if experts.is_plain else BF16
    tensors = [
        RandomTensor("model.norm.weight", (D,), dense, 0.1, mean=1.0),
        RandomTensor("lm_head.weight", (300, D), experts, 0.5, rows=260),
    ]
    named = spelling if experts.is_plain else None
    return RandomModel({"hidden_size": D}, "any", tensors, LAYERS, experts, seed, named)


def index_of(checkpoint: Checkpoint) -> ExpertIndex:
    if checkpoint.container is not None:
        return checkpoint.container.expert_index(LAYERS)
    return index_experts(Census(checkpoint.tensors), LAYERS)


def all_experts(index: ExpertIndex) -> list[bytes]:
    return [
        b"".join(part.tobytes() for part in read_expert(index, layer, expert))
        for layer in index.layers
        for expert in range(layer.num_experts)
    ]


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
def test_every_expert_is_different(fmt: Format, tmp_path: Path) -> None:
    generate_checkpoint(tmp_path / "to", model(fmt))
    checkpoint = Checkpoint.open(tmp_path / "to")
    assert (checkpoint.container is None) == fmt.is_plain
    found = all_experts(index_of(checkpoint))
    assert len(set(found)) == len(found) == 2 * E


@pytest.mark.parametrize("fmt", [F32, INT4], ids=str)
def test_the_seed_decides(fmt: Format, tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        generate_checkpoint(tmp_path / name, model(fmt, seed))
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    other = all_experts(index_of(Checkpoint.open(tmp_path / "c")))
    assert not set(other) & set(all_experts(index_of(Checkpoint.open(tmp_path / "a"))))


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_spellings_hold_the_same_weights(spelling: str, shards: int, tmp_path: Path) -> None:
    generate_checkpoint(tmp_path / "plain", model(BF16))
    generate_checkpoint(tmp_path / "to", model(BF16, spelling=spelling), shards=shards)
    assert len(list((tmp_path / "to").glob("model*.safetensors"))) == shards
    assert (tmp_path / "to" / INDEX_NAME).exists() == (shards > 1)
    plain, spelled = (Checkpoint.open(tmp_path / name) for name in ("plain", "to"))
    assert all_experts(index_of(spelled)) == all_experts(index_of(plain))


PUBLISHED = [
    *((name, spelling) for name in ("f32", "f16", "bf16") for spelling in SPELLINGS),
    *(("fp8-e4m3-b32", spelling) for spelling in SPELLINGS),
    *(("int4-g32-bf16", spelling) for spelling in ("per-expert", "w1w3w2")),
    *(("mxfp4", spelling) for spelling in SPELLINGS),
]


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("name", "spelling"), PUBLISHED)
def test_published_storage_is_read(name: str, spelling: str, biased: bool, tmp_path: Path) -> None:
    """Experts differ and have the deviations asked for, in the format and order of the family."""
    fmt = get_format(name)
    turned = spelling == "fused" and not fmt.name.startswith("fp8")
    about = {"transposed": turned, "interleaved": turned, "biased": biased}
    layers = [replace(layer, **about) for layer in LAYERS]
    dense = fmt if fmt.name.startswith("fp8") else BF16
    head = RandomTensor("lm_head.weight", (300, D), dense, 0.5, rows=260)
    made = RandomModel({"hidden_size": D}, "any", [head], layers, fmt, 0, spelling)
    generate_checkpoint(tmp_path / "to", made)
    census = Census(Checkpoint.open(tmp_path / "to").tensors)
    quantization = Quantization(block=(32, 32), group=32)
    index = index_experts(census, layers, quantization)
    matrix = take_matrix(census, "lm_head.weight", (300, D), quantization)
    assert (matrix is not None) == (dense is not BF16)
    if matrix is None:
        census.take("lm_head.weight", (300, D))
    assert census.finish(()) == ()
    assert len({*all_experts(index)}) == 2 * E
    layout = index.layers[0]
    assert (layout.biases is not None) == biased
    assert {part.format for part in layout.parts} == {fmt}
    gate, up, down, *biases = read_expert(index, layout, 3)
    for part, data in zip(layout.parts, (gate, up, down), strict=True):
        found = fmt.decode(data, (part.rows, part.columns))
        assert abs(found.std() * part.columns**0.5 - 1) < 0.25  # few blocks, whose scales differ
    assert [bias.view("f4").std() > 0.05 for bias in biases] == [True] * 3 * biased


@pytest.mark.parametrize(
    ("name", "spelling"), [("int4-g64", "per-expert"), ("int4-g32-bf16", "fused")]
)
def test_what_nobody_publishes_is_refused(name: str, spelling: str, tmp_path: Path) -> None:
    made = replace(model(get_format(name)), spelling=spelling, dense=[])
    with pytest.raises(UnsupportedModelError, match=f"{name} is not published"):
        generate_checkpoint(tmp_path / "to", made)


def test_names_can_be_those_that_are_published(tmp_path: Path) -> None:
    unrename = [(".mlp.", ".sparse.")]
    generate_checkpoint(tmp_path / "to", model(F32, spelling="w1w3w2"), unrename=unrename)
    names = Checkpoint.open(tmp_path / "to").tensors
    assert "model.layers.3.sparse.experts.9.w2.weight" in names


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
def test_deviations_are_as_asked(fmt: Format) -> None:
    rng = np.random.default_rng(0)
    resident = random_matrix(fmt, (201, 321), rng, 0.25, drawn_rows=200)
    found = fmt.decode(resident, (201, 321))
    assert abs(found[:200].std() / 0.25 - 1) < 0.03
    assert abs(found[:200].mean()) < 0.005
    assert not found[200].any()


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(sorted(FORMATS)), st.integers(1, 40), st.integers(1, 140))
def test_padding_of_random_matrices_is_zero(name: str, rows: int, columns: int) -> None:
    fmt = get_format(name)
    resident = random_matrix(fmt, (rows, columns), np.random.default_rng(0), 1.0)
    assert resident.size == fmt.resident_nbytes((rows, columns))
    if isinstance(fmt, IntegerFormat):
        codes, _ = fmt.split(resident, (rows, columns))
        assert not codes[rows:].any()
        assert not codes[:, columns:].any()


@settings(max_examples=15, deadline=None)
@given(st.sampled_from(["bf16", "int4-g32"]), st.integers(1, 40), st.integers(1, 40))
def test_experts_differ_in_any_shape(name: str, hidden: int, ffn: int) -> None:
    layout = RecordLayout.uniform(get_format(name), hidden * 4, ffn * 4)
    rng = np.random.default_rng(hidden)
    experts = RandomExperts(layout.parts, 50, rng, resident_draw(biased=False))
    found = {b"".join(experts.tensor(e, part).tobytes() for part in range(3)) for e in range(50)}
    assert len(found) == 50


def test_a_killed_container_goes_on(tmp_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate_checkpoint(tmp_path / "to", model(INT4), progress=interrupt)
    with pytest.raises(IncompleteModelError):
        open_container(tmp_path / "to")
    generate_checkpoint(tmp_path / "to", model(INT4))
    generate_checkpoint(tmp_path / "straight", model(INT4))
    assert contents(tmp_path / "to") == contents(tmp_path / "straight")


def test_another_model_does_not_go_on(tmp_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate_checkpoint(tmp_path / "to", model(INT4), progress=interrupt)
    for other in (model(INT4, seed=1), replace(model(INT4), dense=model(INT8).dense)):
        with pytest.raises(CheckpointError, match="unfinished conversion"):
            generate_checkpoint(tmp_path / "to", other)


@pytest.mark.parametrize("fmt", [BF16, INT8], ids=str)
def test_progress_ends_at_the_total(fmt: Format, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    generate_checkpoint(
        tmp_path / "to", model(fmt), progress=lambda done, total: told.append((done, total))
    )
    assert told == sorted(told)
    assert told[-1] == (model(fmt).nbytes, model(fmt).nbytes)


@pytest.mark.parametrize("fmt", [BF16, INT8], ids=str)
def test_a_directory_in_use_is_left_alone(fmt: Format, tmp_path: Path) -> None:
    (tmp_path / "letter.txt").touch()
    with pytest.raises(CheckpointError, match="not empty" if fmt.is_plain else "other files"):
        generate_checkpoint(tmp_path, model(fmt))
    assert [path.name for path in tmp_path.iterdir()] == ["letter.txt"]


def test_a_small_disk_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    huge = replace(LAYERS[0], num_experts=1 << 50)
    with pytest.raises(CheckpointError, match="are free"):
        generate_checkpoint(tmp_path / "to", replace(model(INT4), layers=[huge]))
    assert not (tmp_path / "to").exists()


def test_norms_lie_around_their_mean(tmp_path: Path) -> None:
    generate_checkpoint(tmp_path / "to", model(F32))
    norm = read_tensor(Checkpoint.open(tmp_path / "to").tensors["model.norm.weight"])
    assert abs(norm.view(np.float32).mean() - 1) < 0.1


def test_the_tokenizer_has_every_byte(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path)
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == NUM_TOKENS
    text = "".join(map(chr, range(256))) + "größer 🐦\n  colibri"
    encoded = tokenizer.encode(text, add_special_tokens=False)
    assert encoded.ids == list(text.encode())
    assert tokenizer.decode(encoded.ids) == text
    assert [tokenizer.token_to_id(name) for name in SPECIAL] == [256, 257, 258, 259]
