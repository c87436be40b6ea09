"""Models, drives and ports that are not as they should be, and what mends them."""

import json
import os
import shutil
import socket
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from colibri.checkpoint.byte_tokenizer import write_byte_tokenizer
from colibri.errors import NativeLibraryError
from colibri.lab.doctor import build as build_module
from colibri.lab.doctor import drive as drive_module
from colibri.lab.doctor.build import check_kernels, check_python
from colibri.lab.doctor.drive import (
    check_device,
    check_direct,
    check_file_system,
    check_room,
    speed_finding,
)
from colibri.lab.doctor.examine import examine, worst
from colibri.lab.doctor.finding import Finding, Grade
from colibri.lab.doctor.machine import System
from colibri.lab.doctor.model import plan_finding
from colibri.lab.doctor.server import check_port
from colibri.llm.loading import prepare
from colibri.models.convert import convert_model
from colibri.settings import Settings
from tests.tiny import PLAIN, write_tiny


def silent(stage: str, done: int, total: int) -> None:
    """Progress that nobody sees."""


def of(findings: list[Finding], check: str) -> Finding:
    return next(finding for finding in findings if finding.check == check)


def settings_for(model: Path, **others: Any) -> Settings:
    return Settings.resolve({}, model=str(model), **others)


def examined(model: Path, **others: Any) -> list[Finding]:
    return list(examine(settings_for(model, port=0, **others), silent))


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny(tmp_path_factory.mktemp("doctor") / "published", PLAIN)
    write_byte_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def container(published: Path) -> Path:
    folder = published.parent / "container"
    convert_model(published, folder)
    return folder


@pytest.fixture
def own(container: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(container, tmp_path / "own"))


def test_a_model_that_is_well(container: Path) -> None:
    findings = examined(container)
    assert worst(findings) != Grade.FAULT
    assert of(findings, "model").grade == Grade.FINE
    experts = of(findings, "experts")
    assert experts.grade == Grade.FINE
    assert experts.facts is not None
    assert experts.facts["sampled"] > 0
    assert "100% of the experts in memory" in of(findings, "budget").found
    assert json.loads(json.dumps([finding.as_dict() for finding in findings]))


def test_a_published_model_may_be_converted(published: Path) -> None:
    layout = of(examined(published), "layout")
    assert layout.grade == Grade.NOTE
    assert layout.mend.startswith(f"coli convert {published} ")


def test_a_missing_shard(own: Path) -> None:
    next(own.glob("experts-*.safetensors")).unlink()
    finding = of(examined(own), "model")
    assert finding.grade == Grade.FAULT
    assert "experts-" in finding.found


def test_a_missing_model(tmp_path: Path) -> None:
    findings = examined(tmp_path / "none")
    assert of(findings, "model").grade == Grade.FAULT
    assert of(findings, "port").grade == Grade.FINE  # the rest is looked at all the same


def test_damaged_experts(own: Path) -> None:
    for path in own.glob("experts-*.safetensors"):
        data = bytearray(path.read_bytes())
        data[4096:] = bytes(byte ^ 1 for byte in data[4096:])
        path.write_bytes(data)
    finding = of(examined(own), "experts")
    assert finding.grade == Grade.FAULT
    assert "checksum does not agree" in finding.found
    assert finding.mend == f"coli verify --deep {own}"


def test_a_directory_that_cannot_be_written(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    finding = of(examined(own), "heat")
    assert finding.grade == Grade.NOTE
    assert f"chmod u+w {own}" in finding.mend


def test_a_budget_that_is_too_small(container: Path) -> None:
    assert of(examined(container, ram="32MiB"), "budget").grade == Grade.FAULT


def test_few_experts_in_memory_are_slow(container: Path) -> None:
    plan = prepare(settings_for(container)).plan
    assert plan_finding(plan).grade == Grade.FINE
    few = plan_finding(replace(plan, num_slots=plan.num_experts // 20))
    assert few.grade == Grade.SLOW
    assert "coli convert" in few.mend


def test_a_model_without_tokenizer(tmp_path: Path) -> None:
    findings = examined(write_tiny(tmp_path / "model", PLAIN))
    assert of(findings, "tokenizer").grade == Grade.NOTE


def test_file_systems(container: Path, tmp_path: Path) -> None:
    device = container.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    (tmp_path / "proc/self").mkdir(parents=True)
    for kind, grade in (
        ("ext4", Grade.FINE),
        ("nfs4", Grade.SLOW),
        ("fuse.sshfs", Grade.SLOW),
        ("tmpfs", Grade.NOTE),
        ("overlay", Grade.NOTE),
    ):
        line = f"36 35 {number} / / rw,noatime - {kind} server:/share rw\n"
        (tmp_path / "proc/self/mountinfo").write_text(line)
        finding = check_file_system(container, System(root=tmp_path))
        assert (finding.grade, kind in finding.found) == (grade, True)


@pytest.mark.parametrize(
    ("place", "rotational", "grade", "found"),
    [
        ("devices/pci/nvme0n1", "0", Grade.FINE, "solid state"),
        ("devices/pci/sda", "1", Grade.SLOW, "rotating"),
        ("devices/pci/usb2/sdb", "0", Grade.SLOW, "on USB"),
        ("devices/pci/virtio1/vda", "1", Grade.FINE, "a virtual drive"),
    ],
)
def test_devices(
    container: Path, tmp_path: Path, place: str, rotational: str, grade: Grade, found: str
) -> None:
    device = container.stat().st_dev
    drive = tmp_path / "sys" / place
    (drive / "queue").mkdir(parents=True)
    (drive / "queue/rotational").write_text(f"{rotational}\n")
    link = tmp_path / "sys/dev/block" / f"{os.major(device)}:{os.minor(device)}"
    link.parent.mkdir(parents=True)
    link.symlink_to(drive)
    (finding,) = check_device(container, System(root=tmp_path))
    assert finding.grade == grade
    assert found in finding.found


def test_a_file_system_without_direct_reads(
    container: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        drive_module, "open_for_reading", lambda path: (os.open(path, os.O_RDONLY), False)
    )
    assert check_direct(container / "config.json").grade == Grade.SLOW


def test_a_full_drive(container: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"total": 500 << 30, "used": 499 << 30, "free": 600 << 20})
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    finding = check_room(container / "config.json")
    assert finding.grade == Grade.SLOW
    assert "600.0 MiB free of 500.0 GiB" in finding.found
    assert "coli rm" in finding.mend


def test_speeds_of_drives() -> None:
    rates = {(1 << 20, 1): 1.5e9, (1 << 20, 8): 3e9, (4 << 20, 8): 2.9e9}
    fast = speed_finding(rates, 20 << 20)
    assert (fast.grade, fast.found) == (
        Grade.FINE,
        "3.00 GB/s, 8 reads of 1.0 MiB at a time; 1.50 GB/s one at a time",
    )
    slow = speed_finding({way: rate / 30 for way, rate in rates.items()}, 20 << 20)
    assert slow.grade == Grade.SLOW
    assert "takes 210 ms" in slow.consequence


def test_kernels_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(settings: Settings) -> None:
        raise NativeLibraryError("it has version 1 of the ABI, this package 13: install again")

    assert check_kernels(Settings.resolve({})).grade == Grade.FINE
    reference = check_kernels(Settings.resolve({}, kernels="reference"))
    assert reference.grade == Grade.SLOW
    assert "apt install gcc python3-dev" in reference.mend
    monkeypatch.setattr(build_module, "make_kernels", refuse)
    assert check_kernels(Settings.resolve({})).grade == Grade.FAULT


def test_python_that_is_too_old() -> None:
    assert check_python((3, 9, 2)).grade == Grade.FAULT
    assert check_python().grade == Grade.FINE


class Health(BaseHTTPRequestHandler):
    """Answers as a server of Colibri does, or as anything."""

    body: bytes = b""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def answering() -> Iterator[HTTPServer]:
    server = HTTPServer(("127.0.0.1", 0), Health)
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(
    ("body", "grade"),
    [
        (b'{"status": "ok", "ready": true, "in_flight": 0}', Grade.NOTE),
        (b'{"status": "ok"}', Grade.FAULT),
        (b"<html>", Grade.FAULT),
    ],
)
def test_ports_that_are_taken(answering: HTTPServer, body: bytes, grade: Grade) -> None:
    Health.body = body
    finding = check_port(Settings.resolve({}, port=answering.server_port))
    assert finding.grade == grade
    assert f"127.0.0.1:{answering.server_port}" in finding.found


def test_a_port_whose_program_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("colibri.lab.doctor.server._WAIT_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent_one:
        finding = check_port(Settings.resolve({}, port=silent_one.getsockname()[1]))
    assert finding.grade == Grade.FAULT


def test_the_worst_counts() -> None:
    grades = [Grade.NOTE, Grade.SLOW, Grade.FINE]
    assert worst([Finding("", grade, "") for grade in grades]) == Grade.SLOW
    assert worst([]) == Grade.FINE
