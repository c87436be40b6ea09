"""A rig in a process of its own, whose peak memory and page cache are nobody else's."""

from __future__ import annotations

import multiprocessing
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from colibri.errors import ColibriError
from colibri.kernels.api import Ints
from colibri.lab.mapped import MappedExperts
from colibri.lab.memory_cap import enter
from colibri.lab.rig import Rig, Stretch
from colibri.lab.routed import Script
from colibri.memory.budget import peak_rss
from colibri.models.plan import Plan
from colibri.settings import Settings

_START = multiprocessing.get_context("spawn")
_END_S = 30.0


class Arm:
    """What runs in the other process."""

    def __init__(self, rig: Rig, mapped: bool, drops: bool) -> None:
        """`mapped`: experts are computed where the files are mapped, not read by the engine."""
        self._rig = rig
        rig.drops = drops
        self._mapped = None
        if mapped:
            self._mapped = MappedExperts(rig.prepared.description.experts)
            self._mapped.serve(rig.model)

    def decode(self, num_tokens: int) -> Stretch:
        """See `Rig.decode`."""
        return self._rig.decode(num_tokens)

    def fill(self) -> None:
        """See `Rig.fill`."""
        self._rig.fill()

    def plan(self) -> Plan:
        """How its budget was divided."""
        return self._rig.prepared.plan

    def peak_rss(self) -> int:
        """The most memory that its process ever had resident."""
        return peak_rss()

    def mapped_rate(self, nbytes: int) -> float:
        """Bytes per second at which mapped records are read that are not in memory."""
        assert self._mapped is not None
        return self._mapped.rate(self._rig.kernels, nbytes)


class Worker:
    """The near end of an `Arm`. Close it."""

    def __init__(
        self,
        settings: Settings,
        ids: Ints,
        num_experts: int,
        *,
        group: Path | None = None,
        mapped: bool = False,
        drops: bool = True,
        **changes: Any,
    ) -> None:
        """Open a rig there, routed by `ids [T, L, A]`, in a memory cgroup if one is given.

        Raises:
            ColibriError: what opening it raised.
        """
        self._near, far = _START.Pipe()
        alone = replace(settings, profile=None)  # traces are of this process
        options = (alone, ids, num_experts, group, mapped, drops, changes)
        self._process = _START.Process(target=_serve, args=(far, options), daemon=True)
        self._process.start()
        far.close()
        self._answer()

    def ask(self, name: str, *arguments: Any) -> Any:
        """Call a method of the arm.

        Raises:
            ColibriError: what it raised.
        """
        self._near.send((name, arguments))
        return self._answer()

    def _answer(self) -> Any:
        try:
            good, value = self._near.recv()
        except EOFError:
            self._process.join(_END_S)
            raise ColibriError(
                f"a process of the bench ended (exit code {self._process.exitcode}): "
                "is memory short?"
            ) from None
        if not good:
            raise value
        return value

    def close(self) -> None:
        """End the process."""
        self._near.close()
        self._process.join(_END_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _serve(pipe: Connection, options: tuple[Any, ...]) -> None:
    settings, ids, num_experts, group, mapped, drops, changes = options
    try:
        if group is not None:
            enter(group)
        rig = Rig.open(settings, Script(ids, num_experts), **changes)
    except (ColibriError, OSError) as error:
        pipe.send((False, error))
        return
    with rig:
        arm = Arm(rig, mapped, drops)
        pipe.send((True, None))
        _answer_all(pipe, arm)


def _answer_all(pipe: Connection, arm: Arm) -> None:
    while True:
        try:
            name, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, getattr(arm, name)(*arguments)))
        except ColibriError as error:
            pipe.send((False, error))
