"""One budget divided before anything is loaded, in the sizes that the loader will allocate.

The order: process, dense weights, workspace, K/V, then expert slots out of 98 % of what is left.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from colibri.errors import BudgetError, SettingsError
from colibri.formats import BF16, F16, F32, INT8_ROWS
from colibri.kernels.api import KV_BLOCK, Kernels, Limits
from colibri.kernels.mapping import mapping_nbytes
from colibri.kv import MOST_SNAPSHOTS, KVFormat, block_nbytes, cell_nbytes
from colibri.memory.arena import num_buffers, staging_nbytes
from colibri.memory.budget import usable_bytes
from colibri.memory.slot_classes import divide, divide_slots, minimum_slots, slots_nbytes
from colibri.models.description import Description
from colibri.units import format_bytes, format_bytes_up

KV_FORMATS: dict[str, KVFormat] = {fmt.name: fmt for fmt in (F32, BF16, F16, INT8_ROWS)}
_SLOT_SHARE = 0.98  # of what is left; the rest absorbs what cannot be foreseen to the byte
_KV_SHARE = 0.25  # of what the dense part leaves, unless `kv_ram` says otherwise
_ALLOWANCE = (
    24 << 20
)  # growth of the process after it was measured: Python objects, reader stacks, page tables
_JITTER = 1 << 20  # by which one start of the program differs from the next
_MAPPING_SLACK = 3 * (2 << 20)  # dense, K/V and arena each may round up to one huge page


@dataclass(frozen=True, slots=True)
class MemoryConfig:
    """What the user asked of memory.

    Attributes:
        ram: bound on the program's resident bytes; None means what the machine leaves.
        expert_slots: a number of slots (int), a share of all experts (float in (0, 1]), or None:
            what fits.
        kv: format of the K/V pool, `auto` for the checkpoint's own float format.
        kv_ram: bytes for K/V; None means a quarter of what dense leaves at most.
        context_length: positions of one session; None means what fits `kv_ram`.
        prefill_chunk: prompt tokens of the largest step.
        max_sessions: replies that are computed together.
    """

    ram: int | None = None
    expert_slots: int | float | None = None
    kv: str = "auto"
    kv_ram: int | None = None
    context_length: int | None = None
    prefill_chunk: int = 512
    max_sessions: int = 1


@dataclass(frozen=True, slots=True)
class Plan:
    """Where every byte goes; the loader carries out exactly this."""

    budget_bytes: int
    process_bytes: int
    dense_bytes: int
    workspace_bytes: int
    kv_bytes: int
    recurrent_bytes: int  # state of fixed size (recurrences, windows), and its snapshots
    staging_bytes: int
    slots_bytes: int
    spare_bytes: int
    context_length: int
    kv_format: str
    num_kv_blocks: int
    num_cells: int  # one a sequence, and one a snapshot
    prefill_chunk: int
    max_sessions: int
    max_positions: int  # of a sequence, by which what layers keep of it was decided
    slots: tuple[int, ...]  # of each class, in the order of `slot_classes`
    num_slots: int
    num_experts: int
    record_bytes: int  # of the largest expert
    bytes_per_token_cold: int  # read for one token when nothing is resident, rows of tables too
    table_bytes: int = 0  # of tables that stay on disk; no share of the budget
    table_bytes_per_token: int = 0

    @property
    def max_rows(self) -> int:
        """Of the largest step: prompt tokens, and a token of every other reply."""
        return self.prefill_chunk + self.max_sessions - 1

    @property
    def _positions(self) -> int:
        """Of all sessions."""
        alone = self.max_sessions == 1
        return self.context_length if alone else self.num_kv_blocks * KV_BLOCK

    def rows(self) -> list[tuple[str, int]]:
        """Name and bytes of each share, for printing."""
        recurrent = [("state of fixed size", self.recurrent_bytes)] if self.num_cells else []
        return [
            ("process", self.process_bytes),
            ("dense weights", self.dense_bytes),
            ("workspace", self.workspace_bytes),
            *([("staging", self.staging_bytes)] if self.staging_bytes else []),
            (f"K/V of {self._positions:,} positions ({self.kv_format})", self.kv_bytes),
            *recurrent,
            (f"{self.num_slots:,} of {self.num_experts:,} experts", self.slots_bytes),
            ("spare", self.spare_bytes),
        ]

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return asdict(self)


def plan_model(
    description: Description, memory: MemoryConfig, kernels: Kernels, process_bytes: int
) -> Plan:
    """Divide the budget.

    Args:
        description: the checkpoint, understood.
        memory: what the user asked.
        kernels: they know their workspace.
        process_bytes: resident bytes of the program now, tokenizer loaded.

    Raises:
        BudgetError: it does not fit; says by how much and what would fit.
        SettingsError: the context or the number of slots is out of range.
    """
    return _Planner(
        description, memory, kernels, process_bytes + _ALLOWANCE + _MAPPING_SLACK
    ).plan()


class _Planner:
    def __init__(
        self, description: Description, memory: MemoryConfig, kernels: Kernels, process_bytes: int
    ) -> None:
        self.description, self.memory = description, memory
        self.experts, self.config = description.experts, description.blueprint.config
        layers = description.blueprint.layers
        self.active = max((layer.num_experts_per_tok for layer in layers), default=0)
        self.budget = usable_bytes(process_bytes) if memory.ram is None else memory.ram
        self.process, self.dense = process_bytes, mapping_nbytes(description.dense_nbytes)
        # No step has more rows than the context has positions.
        longest = memory.context_length or self.config.max_position_embeddings
        self.chunk = min(memory.prefill_chunk, longest)
        limits = description.blueprint.limits(self.chunk + memory.max_sessions - 1)
        self.workspace = kernels.workspace_nbytes(limits) + _arrays_nbytes(
            limits, description.blueprint.array_floats(limits.rows), memory.max_sessions
        )
        buffer = staging_nbytes(self.experts)
        self.staging = mapping_nbytes(num_buffers(buffer) * buffer)
        self.kv_format = self._kv_format()
        self.positions = longest
        states = description.blueprint.states(longest)
        self.kv_block = block_nbytes(states, self.kv_format)
        each = 1 + MOST_SNAPSHOTS if cell_nbytes(states, self.kv_format) else 0
        self.cells = memory.max_sessions * each
        self.recurrent = mapping_nbytes(self.cells * cell_nbytes(states, self.kv_format))

    def plan(self) -> Plan:
        fixed = self.process + self.dense + self.workspace + self.recurrent + self.staging
        asked = self._asked_slots()
        least = minimum_slots(self.experts, self.active) if asked is None else asked
        least_bytes = slots_nbytes(self.experts, least)
        after_fixed = self.budget - fixed
        kv_room = self._kv_room(after_fixed, least_bytes)
        blocks = kv_room // self.kv_block
        kv, context = blocks * self.kv_block, self._context(blocks)
        left = after_fixed - kv
        if left < least_bytes:
            raise BudgetError(self._too_small(fixed, context, kv, least))
        # What rounding leaves of `kv_room` stays spare: a block more must not cost a slot.
        for_slots = max(int((after_fixed - kv_room) * _SLOT_SHARE), least_bytes)
        slots = divide(for_slots, self.experts, self.active) if asked is None else asked
        slots_bytes = slots_nbytes(self.experts, slots)
        blueprint = self.description.blueprint
        records = [layer.record_nbytes for layer in self.experts.layers]
        by_rows = sum(table.nbytes_per_token for table in self.description.tables)
        return Plan(
            budget_bytes=self.budget,
            process_bytes=self.process,
            dense_bytes=self.dense,
            workspace_bytes=self.workspace,
            staging_bytes=self.staging,
            kv_bytes=kv,
            recurrent_bytes=self.recurrent,
            slots_bytes=slots_bytes,
            spare_bytes=left - slots_bytes,
            context_length=context,
            kv_format=self.kv_format.name,
            num_kv_blocks=blocks,
            num_cells=self.cells,
            prefill_chunk=self.chunk,
            max_sessions=self.memory.max_sessions,
            max_positions=self.positions,
            slots=slots,
            num_slots=sum(slots),
            num_experts=sum(layer.num_experts for layer in self.experts.layers),
            record_bytes=max(records, default=0),
            bytes_per_token_cold=self.active * sum(records[: len(blueprint.sparse_layers())])
            + by_rows,
            table_bytes=sum(table.nbytes for table in self.description.tables),
            table_bytes_per_token=by_rows,
        )

    def _kv_format(self) -> KVFormat:
        if self.memory.kv == "auto":
            return self.description.float_format
        try:
            return KV_FORMATS[self.memory.kv]
        except KeyError:
            known = ", ".join(("auto", *KV_FORMATS))
            raise SettingsError(
                f"kv = {self.memory.kv!r} is unknown; choose one of {known}"
            ) from None

    def _kv_room(self, after_fixed: int, slots_bytes: int) -> int:
        """Bytes for K/V: at least a block, or the context asked for; at most one a session."""
        limit, wanted = self.config.max_position_embeddings, self.memory.context_length
        if wanted is not None and not 0 < wanted <= limit:
            raise SettingsError(
                f"context_length = {wanted:,} is out of range; this model takes 1 to {limit:,}"
            )
        one = -(-(wanted or limit) // KV_BLOCK) * self.kv_block
        sessions, room = self.memory.max_sessions, self.memory.kv_ram
        least = self.kv_block if wanted is None else one
        if room is not None and room < least:
            raise BudgetError(self._kv_too_small(room, least))
        if wanted is not None and sessions == 1:
            return one
        if room is None:
            room = min(int(max(after_fixed, 0) * _KV_SHARE), after_fixed - slots_bytes)
        return min(max(room, least), sessions * one)

    def _kv_too_small(self, room: int, least: int) -> str:
        fitting = room // self.kv_block * KV_BLOCK
        positions = least // self.kv_block * KV_BLOCK
        advice = f", or set context_length to {fitting} or less" if fitting else ""
        return (
            f"kv_ram = {format_bytes(room)} is too small: K/V of {positions} positions take "
            f"{format_bytes_up(least)}; raise kv_ram to that{advice}"
        )

    def _context(self, blocks: int) -> int:
        limit = self.memory.context_length or self.config.max_position_embeddings
        return min(blocks * KV_BLOCK, limit)

    def _asked_slots(self) -> tuple[int, ...] | None:
        """What `expert_slots` says, None where it leaves the number to the budget."""
        wanted = self.memory.expert_slots
        if wanted is None:
            return None
        total = sum(layer.num_experts for layer in self.experts.layers)
        number = math.ceil(wanted * total) if isinstance(wanted, float) else wanted
        least = sum(minimum_slots(self.experts, self.active))
        if number > total:
            raise SettingsError(
                f"expert_slots = {wanted}, but this model has {total:,} experts: ask for at most "
                f"{total}, or for 100%"
            )
        if number < least:
            raise BudgetError(
                f"expert_slots = {wanted} gives {number} slots, but one token needs {least} at a "
                f"time; ask for at least {least} (of {total} experts)"
            )
        return divide_slots(number, self.experts, self.active)

    def _recurrent_share(self) -> str:
        return f"state of fixed size {format_bytes(self.recurrent)}, " if self.cells else ""

    def _too_small(self, fixed: int, context: int, kv: int, slots: tuple[int, ...]) -> str:
        slots_bytes = slots_nbytes(self.experts, slots)
        needed = fixed + kv + slots_bytes
        advice = [f"raise ram to at least {format_bytes_up(needed + _JITTER)}"]
        for_kv = self.budget - fixed - slots_bytes
        if context > KV_BLOCK and for_kv >= self.kv_block:
            advice.append(f"set context_length to {for_kv // self.kv_block * KV_BLOCK} or less")
        left = self.budget - fixed - kv
        minimum = minimum_slots(self.experts, self.active)
        if slots != minimum and left >= slots_nbytes(self.experts, minimum):
            fitting = sum(divide(left, self.experts, self.active))
            advice.append(f"set expert_slots to {fitting} or less")
        return (
            f"the budget of {format_bytes(self.budget)} is too small by "
            f"{format_bytes_up(needed - self.budget)}: process {format_bytes(self.process)}, "
            f"dense weights {format_bytes(self.dense)}, workspace "
            f"{format_bytes(self.workspace + self.staging)}, "
            f"{self._recurrent_share()}K/V of {context} positions {format_bytes(kv)}, "
            f"{sum(slots)} expert slots {format_bytes(slots_bytes)}; {', or '.join(advice)}"
        )


def _arrays_nbytes(limits: Limits, array_floats: int, sessions: int) -> int:
    """NumPy arrays of one step, and logits while one is sampled.

    Rows are of hidden_size; one sublayer at a time has arrays of its own.
    """
    rows = 5 * limits.rows * limits.hidden_size + array_floats
    return 4 * rows + (8 * 6 + 4 * (sessions - 1)) * limits.vocab_size
