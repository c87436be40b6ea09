"""Small containers for tests."""

from pathlib import Path

import numpy as np

from colibri.checkpoint.container import Container, open_container
from colibri.checkpoint.container_writer import ContainerWriter
from colibri.checkpoint.experts import ExpertLayer
from colibri.checkpoint.record import RecordLayout
from colibri.formats import BF16, F32, Format, get_format

D, F, E, LAYERS = 72, 40, 3, (1, 4)
INT4, INT8 = get_format("int4-g64"), get_format("int8-g32")
SHAPES = ((F, D), (F, D), (D, F))
REQUESTS = [ExpertLayer(layer, f"model.layers.{layer}.mlp.experts", E, D, F) for layer in LAYERS]
CONFIG = {"model_type": "any", "hidden_size": D}
SOURCE = {"name": "test"}


def matrices(layer: int, expert: int) -> list[np.ndarray]:
    rng = np.random.default_rng([layer, expert])
    return [rng.standard_normal(shape, np.float32) for shape in SHAPES]


def write_layer(writer: ContainerWriter, layer: int, layout: RecordLayout) -> None:
    with writer.layer(layer, E, layout) as out:
        for expert in range(E):
            out.add(expert, *matrices(layer, expert))


def write_dense(writer: ContainerWriter) -> None:
    writer.dense("model.norm.weight", np.arange(D, dtype=np.float32), F32)
    writer.dense("model.embed_tokens.weight", np.ones((16, D), np.float32), BF16)
    writer.dense("lm_head.weight", np.full((16, D), 0.5, np.float32), INT8)


def write_container(directory: Path, fmt: Format = INT4) -> Container:
    writer = ContainerWriter(directory, family="any", source=SOURCE)
    for layer in LAYERS:
        write_layer(writer, layer, RecordLayout.uniform(fmt, D, F))
    write_dense(writer)
    writer.finish(CONFIG)
    return opened(directory)


def opened(directory: Path) -> Container:
    container = open_container(directory)
    assert container is not None
    return container
