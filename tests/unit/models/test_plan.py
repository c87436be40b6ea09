"""The plan keeps to its budget, and what it advises works."""

import json
import re
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri.checkpoint.index import Checkpoint
from colibri.errors import BudgetError, SettingsError
from colibri.formats import BF16, F16, F32
from colibri.kernels.api import KV_BLOCK
from colibri.kernels.mapping import mapping_nbytes
from colibri.kernels.reference import ReferenceKernels
from colibri.kv import block_nbytes, cell_nbytes
from colibri.memory.slot_classes import divide, minimum_slots, slots_nbytes
from colibri.models import plan as plan_module
from colibri.models.blueprint import Blueprint
from colibri.models.description import Description
from colibri.models.plan import MemoryConfig, Plan, plan_model
from colibri.units import parse_bytes
from tests.tiny import FAMILIES, SPARSE, write_tiny

PROCESS = 40 << 20
NAMES = [family.model_type for family in FAMILIES]
SPARSE_NAMES = [family.model_type for family in SPARSE]
KERNELS = ReferenceKernels()
each_name = pytest.mark.parametrize("name", NAMES)
each_sparse_name = pytest.mark.parametrize("name", SPARSE_NAMES)
names = st.sampled_from(NAMES)
sparse_names = st.sampled_from(SPARSE_NAMES)
room = st.integers(0, 6 << 20)  # above the least budget; all of a tiny model takes less


@cache
def describe(name: str, dtype: str = "F32", **changes: Any) -> Description:
    """The tiny checkpoint of a family; its files are no longer needed once it is described."""
    (family,) = (found for found in FAMILIES if found.model_type == name)
    with TemporaryDirectory() as folder:
        return Description.of(
            Checkpoint.open(write_tiny(Path(folder), family, dtype=dtype, **changes))
        )


def make(name: str, **memory: Any) -> Plan:
    """A plan of the tiny model, in chunks of 32."""
    return plan_model(
        describe(name), MemoryConfig(**{"prefill_chunk": 32, **memory}), KERNELS, PROCESS
    )


def refused(name: str, **memory: Any) -> str:
    """Why there is no plan."""
    with pytest.raises(BudgetError) as refusal:
        make(name, **memory)
    return str(refusal.value)


@cache
def least(name: str) -> int:
    """The smallest budget, found by halving: what fits at it and not a byte below."""
    low, high = PROCESS, PROCESS + (256 << 20)
    while high - low > 1:
        middle = (low + high) // 2
        try:
            make(name, ram=middle)
            high = middle
        except BudgetError:
            low = middle
    return high


def block(name: str) -> int:
    """Bytes of 64 positions."""
    return block_nbytes(describe(name).blueprint.states(256), F32)


def check(plan: Plan, name: str) -> None:
    """Shares are not negative, sum to the budget and are what their parts take."""
    description = describe(name)
    shares = [nbytes for _, nbytes in plan.rows()]
    assert min(shares) >= 0
    assert sum(shares) == plan.budget_bytes
    assert plan.kv_bytes == plan.num_kv_blocks * block(name)
    context = -(-plan.context_length // KV_BLOCK)
    assert context <= plan.num_kv_blocks <= plan.max_sessions * context
    assert plan.slots_bytes == slots_nbytes(description.experts, plan.slots)
    assert plan.num_slots == sum(plan.slots)
    assert plan.dense_bytes == mapping_nbytes(description.dense_nbytes)
    assert plan.num_experts == sum(layer.num_experts for layer in description.experts.layers)
    active = description.blueprint.limits(1).num_experts_per_tok
    assert plan.slots >= minimum_slots(description.experts, active)
    assert plan.num_slots <= plan.num_experts


@settings(max_examples=60)
@given(names, room)
def test_a_plan_keeps_to_its_budget(name: str, more: int) -> None:
    budget = least(name) + more
    plan = make(name, ram=budget)
    assert plan.budget_bytes == budget
    check(plan, name)


@settings(max_examples=60)
@given(names, room, st.integers(1, 256), st.sampled_from(["f32", "f16", "bf16"]))
def test_a_context_that_is_asked_for_is_kept(name: str, more: int, context: int, kv: str) -> None:
    budget = least(name) + (2 << 20) + more
    plan = make(name, ram=budget, context_length=context, kv=kv)
    assert plan.context_length == context
    assert plan.num_kv_blocks == -(-context // KV_BLOCK)
    assert plan.kv_format == kv
    assert sum(nbytes for _, nbytes in plan.rows()) == budget


@settings(max_examples=60)
@given(names, room, room, st.sampled_from([None, 64, 200]))
def test_more_memory_never_means_less_of_anything(
    name: str, first: int, second: int, context: int | None
) -> None:
    small, large = sorted((first, second))
    start = least(name) + 4 * block(name)
    lower, upper = (make(name, ram=start + more, context_length=context) for more in (small, large))
    assert all(a <= b for a, b in zip(lower.slots, upper.slots, strict=True))
    assert lower.context_length <= upper.context_length


@each_name
def test_all_experts_fit_a_large_budget(name: str) -> None:
    plan = make(name, ram=least(name) + (64 << 20))
    check(plan, name)
    assert plan.num_slots == plan.num_experts
    assert plan.context_length == describe(name).blueprint.config.max_position_embeddings


@each_name
def test_the_least_budget_holds_one_token(name: str) -> None:
    plan = make(name, ram=least(name))
    check(plan, name)
    assert plan.context_length == KV_BLOCK
    experts = describe(name).experts
    assert plan.slots == minimum_slots(experts, plan.num_slots)
    message = refused(name, ram=least(name) - 1)
    assert "too small by 1 B" in message


@settings(max_examples=60)
@given(
    sparse_names,
    st.integers(1 << 20, 64 << 20),
    st.sampled_from([None, 1, 64, 65, 256]),
    st.sampled_from([None, 5, 0.5, 1.0]),
    st.sampled_from([None, 4, 400]),
)
def test_what_a_refusal_advises_works(
    name: str, short: int, context: int | None, slots: int | float | None, blocks: int | None
) -> None:
    kv_ram = None if blocks is None else blocks * block(name)
    asked = {"context_length": context, "expert_slots": slots, "kv_ram": kv_ram}
    ram = least(name) + (short - 4_000_000)
    try:
        make(name, ram=ram, **asked)
    except BudgetError as refusal:
        message = str(refusal)
    else:
        return
    found = re.search(r"raise ram to at least ([\d.]+ \w+)", message)
    assert found is not None
    enough = parse_bytes(found[1])
    make(name, ram=enough, **asked)
    by = re.search(r"too small by ([\d.]+ \w+)", message)
    assert by is not None
    make(name, ram=ram + parse_bytes(by[1]), **asked)
    slack = enough // 10 + 1  # one decimal of a unit
    with pytest.raises(BudgetError):
        make(name, ram=enough - slack, **asked)


@each_sparse_name
def test_a_shorter_context_or_fewer_slots_are_advised_where_they_help(name: str) -> None:
    budget = least(name) + block(name)
    message = refused(name, ram=budget, context_length=256)
    found = re.search(r"set context_length to (\d+) or less", message)
    assert found is not None
    assert make(name, ram=budget, context_length=int(found[1])).context_length == int(found[1])
    refused(name, ram=budget, context_length=int(found[1]) + 1)
    experts = describe(name).experts
    budget = least(name) + 3 * experts.layers[0].slot_nbytes
    message = refused(name, ram=budget, expert_slots=1.0)
    found = re.search(r"set expert_slots to (\d+) or less", message)
    assert found is not None
    assert make(name, ram=budget, expert_slots=int(found[1])).num_slots == int(found[1])
    refused(name, ram=budget, expert_slots=int(found[1]) + 1)


@settings(max_examples=40)
@given(sparse_names, st.integers(1, 400))
def test_a_number_of_slots_is_exact(name: str, wanted: int) -> None:
    ram = least(name) + (64 << 20)
    total = make(name, ram=ram).num_experts
    fewest = sum(make(name, ram=least(name)).slots)
    if wanted > total:
        with pytest.raises(SettingsError, match=f"expert_slots = {wanted}, .* at most {total}"):
            make(name, ram=ram, expert_slots=wanted)
    elif wanted < fewest:
        message = refused(name, ram=ram, expert_slots=wanted)
        assert f"expert_slots = {wanted}" in message
        assert f"at least {fewest} (of {total} experts)" in message
    else:
        plan = make(name, ram=ram, expert_slots=wanted)
        check(plan, name)
        assert plan.num_slots == wanted


@each_name
@pytest.mark.parametrize("share", [0.25, 0.3, 0.5, 1.0])
def test_a_share_of_slots_is_rounded_up(name: str, share: float) -> None:
    plan = make(name, ram=least(name) + (64 << 20), expert_slots=share)
    assert plan.num_slots - 1 < share * plan.num_experts <= plan.num_slots


@each_name
def test_slots_asked_for_come_before_a_long_context(name: str) -> None:
    """Without a context of its own, K/V takes what the experts leave."""
    ram = least(name) + (64 << 20)
    everything = make(name, ram=ram, expert_slots=1.0, context_length=64)
    tight = ram - everything.spare_bytes
    plan = make(name, ram=tight, expert_slots=1.0)
    assert plan.num_slots == plan.num_experts
    assert plan.context_length == 64


@pytest.mark.parametrize("context", [0, -1, 257, 10**9])
def test_a_context_out_of_range(context: int) -> None:
    with pytest.raises(SettingsError, match=f"context_length = {context:,} .* takes 1 to 256"):
        make(NAMES[0], ram=1 << 30, context_length=context)


def test_a_context_need_not_be_whole_blocks() -> None:
    name = NAMES[0]
    description = describe(name, max_position_embeddings=100)
    plan = plan_model(description, MemoryConfig(ram=1 << 30), KERNELS, PROCESS)
    assert (plan.context_length, plan.num_kv_blocks) == (100, 2)


@pytest.mark.parametrize(("blocks", "wanted"), [(1, 64), (2.9, 128), (400, 256)])
def test_memory_for_keys_and_values(blocks: float, wanted: int) -> None:
    name = NAMES[0]
    plan = make(name, ram=1 << 30, kv_ram=int(blocks * block(name)))
    check(plan, name)
    assert plan.context_length == wanted


@pytest.mark.parametrize("context", [None, 64, 65, 256])
def test_memory_for_keys_and_values_is_never_exceeded(context: int | None) -> None:
    name = NAMES[0]
    least_kv = -(-(context or 1) // KV_BLOCK) * block(name)
    asked = {"ram": 1 << 30, "context_length": context}
    assert make(name, kv_ram=least_kv, **asked).kv_bytes == least_kv
    message = refused(name, kv_ram=least_kv - 1, **asked)
    assert message.startswith("kv_ram = ")
    found = re.search(r"take ([\d.]+ \w+);", message)
    assert found is not None
    assert make(name, kv_ram=parse_bytes(found[1]), **asked).kv_bytes >= least_kv
    shorter = re.search(r"set context_length to (\d+) or less", message)
    assert (shorter is not None) == (least_kv > block(name))
    if shorter is not None:
        make(name, kv_ram=least_kv - 1, **(asked | {"context_length": int(shorter[1])}))


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_keys_and_values_follow_the_checkpoint(dtype: str) -> None:
    memory = MemoryConfig(ram=1 << 30)
    plan = plan_model(describe(NAMES[0], dtype=dtype), memory, KERNELS, PROCESS)
    assert plan.kv_format == {"F32": F32, "F16": F16, "BF16": BF16}[dtype].name


def test_an_unknown_format_of_keys_and_values() -> None:
    with pytest.raises(SettingsError, match=r"kv = 'int3'.* auto, f32, bf16, f16, int8"):
        make(NAMES[0], ram=1 << 30, kv="int3")


def test_longer_chunks_take_a_larger_workspace() -> None:
    small, large = (make(NAMES[0], ram=1 << 30, prefill_chunk=rows) for rows in (8, 512))
    assert small.workspace_bytes < large.workspace_bytes
    assert (small.prefill_chunk, large.prefill_chunk) == (8, 256)


def test_no_chunk_is_longer_than_the_context() -> None:
    plan = make(NAMES[0], ram=1 << 30, prefill_chunk=10**12, context_length=100)
    assert plan.prefill_chunk == 100


def test_without_a_budget_the_machine_says(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def usable(process_bytes: int) -> int:
        asked.append(process_bytes)
        return 1 << 30

    monkeypatch.setattr(plan_module, "usable_bytes", usable)
    assert make(NAMES[0]).budget_bytes == 1 << 30
    assert asked == [make(NAMES[0], ram=1 << 30).process_bytes]
    assert asked[0] > PROCESS


@each_sparse_name
def test_figures_for_people_and_programs(name: str) -> None:
    plan = make(name, ram=1 << 30)
    assert json.loads(json.dumps(plan.as_dict()))["num_slots"] == plan.num_slots
    experts = describe(name).experts
    assert plan.record_bytes == max(layer.record_nbytes for layer in experts.layers)
    active = describe(name).blueprint.limits(1).num_experts_per_tok
    records = active * sum(e.record_nbytes for e in experts.layers)
    assert plan.bytes_per_token_cold == records + plan.table_bytes_per_token
    assert sum(divide(plan.slots_bytes, experts, active)) == plan.num_slots
    assert f"{plan.num_slots} of {plan.num_experts} experts" in dict(plan.rows())


def test_a_model_without_routed_experts() -> None:
    """Every layer dense by its config: nothing streams, everything else holds."""
    name = next(n for n in NAMES if hasattr(describe(n).blueprint.config, "mlp_only_layers"))
    description = describe(name, mlp_only_layers=(0, 1, 2))
    plan = plan_model(description, MemoryConfig(ram=1 << 30), KERNELS, PROCESS)
    assert (plan.num_experts, plan.num_slots, plan.slots_bytes) == (0, 0, 0)
    assert plan.context_length == 256


RECURRENT_NAMES = [
    f.model_type for f in FAMILIES if cell_nbytes(Blueprint.of(f.tiny_config()).states(256), F32)
]


@pytest.mark.parametrize("name", [NAMES[0], *RECURRENT_NAMES[:1]])
def test_every_session_gets_its_share(name: str) -> None:
    """Contexts as far as they fit a quarter, a cell and its snapshots, a row of a step, logits."""
    one, four = (make(name, ram=1 << 30, max_sessions=n) for n in (1, 4))
    check(four, name)
    assert four.context_length == one.context_length
    assert (four.num_kv_blocks, four.num_cells) == (4 * one.num_kv_blocks, 4 * one.num_cells)
    assert (one.max_rows, four.max_rows) == (32, 35)
    assert four.workspace_bytes > one.workspace_bytes
    given = make(name, ram=1 << 30, max_sessions=4, kv_ram=3 * block(name), context_length=64)
    assert (given.num_kv_blocks, given.context_length) == (3, 64)
    assert make(name, ram=1 << 30, max_sessions=4, context_length=64).num_kv_blocks == 4


@pytest.mark.parametrize("context", [None, 128])
def test_what_is_advised_for_several_sessions_works(context: int | None) -> None:
    name = NAMES[0]
    asked = {"max_sessions": 3, "context_length": context}
    advice = re.search(r"raise ram to at least ([\d.]+ \w+)", refused(name, ram=PROCESS, **asked))
    assert advice is not None
    plan = make(name, ram=parse_bytes(advice[1]), **asked)
    check(plan, name)
    assert plan.num_kv_blocks >= (context or 1) // KV_BLOCK
