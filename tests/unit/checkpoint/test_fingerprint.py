"""Checkpoints of equal names and sizes are told apart."""

from pathlib import Path

from colibri.checkpoint.fingerprint import SAMPLE_BYTES, fingerprint


def write(folder: Path, *parts: bytes) -> list[tuple[Path, int, int]]:
    """Files of one tensor each, and where these lie."""
    folder.mkdir()
    for number, part in enumerate(parts):
        (folder / f"{number}.safetensors").write_bytes(b"head" + part)
    return [(folder / f"{n}.safetensors", 4, len(part)) for n, part in enumerate(parts)]


def test_it_depends_on_every_tensor_but_not_on_the_folder(tmp_path: Path) -> None:
    parts = bytes(1000), bytes(range(200)), b"x"
    found = fingerprint(write(tmp_path / "a", *parts))
    assert fingerprint(write(tmp_path / "b", *parts)) == found
    for number, part in enumerate(parts):
        trained = bytes(byte ^ 1 for byte in part)
        others = (*parts[:number], trained, *parts[number + 1 :])
        assert fingerprint(write(tmp_path / f"c{number}", *others)) != found


def test_the_order_of_the_places_and_repeated_ones_do_not_count(tmp_path: Path) -> None:
    places = write(tmp_path / "a", bytes(10), bytes(SAMPLE_BYTES), b"")
    assert fingerprint([*reversed(places), places[0]]) == fingerprint(places)
