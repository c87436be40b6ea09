"""All checks, one after another."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from colibri.checkpoint.index import Checkpoint
from colibri.errors import ColibriError
from colibri.lab.doctor.build import build_findings
from colibri.lab.doctor.drive import drive_findings, no_files
from colibri.lab.doctor.finding import Finding, Grade
from colibri.lab.doctor.machine import System, machine_findings
from colibri.lab.doctor.model import broken, census, model_findings
from colibri.lab.doctor.server import check_port
from colibri.llm.loading import LoadProgress
from colibri.llm.location import find_model
from colibri.models.description import Description
from colibri.settings import Settings

SCHEMA = "colibri.doctor/1"


def examine(
    settings: Settings, progress: LoadProgress, system: System | None = None
) -> Iterator[Finding]:
    """Look at build, machine, model, drive and port; a check that fails is a finding."""
    system = system or System()
    yield from build_findings(settings)
    yield from machine_findings(system)
    try:
        checkpoint = Checkpoint.open(find_model(settings), settings.family)
    except ColibriError as error:
        yield broken(error)
    else:
        found, description = census(settings, checkpoint)
        yield found
        if description is not None:
            yield from model_findings(description, settings, progress)
            yield from _drive(description, system, progress)
    yield check_port(settings)


def _drive(description: Description, system: System, progress: LoadProgress) -> Iterator[Finding]:
    index = description.experts
    files = [*index.files, *(tensor.spec.file for tensor in description.dense)]
    if not files:
        yield no_files(description.checkpoint.directory)
        return
    try:
        yield from drive_findings(Path(files[0]), index, system, progress)
    except (OSError, ColibriError) as error:
        yield broken(error if isinstance(error, ColibriError) else ColibriError(str(error)))


def worst(findings: list[Finding]) -> Grade:
    """The grade that matters most."""
    return max((each.grade for each in findings), key=list(Grade).index, default=Grade.FINE)
