"""Hands out experts to compute with, whichever tier they were in.

Bookkeeping is a few arrays: who is in which slot, which slots are leased, and the reader's state
words. A hit is a look-up in them. They are consistent at each step, so that Ctrl-C may come
anywhere: an expert may be forgotten, but no slot has two owners, none is LOADING without a job.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from colibri.checkpoint.experts import ExpertIndex
from colibri.errors import ColibriError
from colibri.kernels.api import EMPTY, FAILED, LOADING, READY, Ints, Slots
from colibri.memory.arena import Arena
from colibri.memory.eviction import Keys, Policy
from colibri.memory.heat import Heat, warm_order
from colibri.memory.jobs import Queue, Reader
from colibri.memory.lease import Lease, Numbers
from colibri.memory.predictions import Predictions
from colibri.memory.read_ahead import Background, Origin, ReadAhead
from colibri.memory.read_errors import read_error, too_many
from colibri.memory.record_table import RecordTable
from colibri.memory.slot_classes import slot_classes
from colibri.memory.slot_ranges import SlotRanges
from colibri.memory.store_stats import StoreStats

_NOWHERE = -1


class ExpertStore:
    """Owns arena, reader and policy; safe to use from several threads.

    Attributes:
        table: what `moe_step` gets.
        between_tokens: called before the first layer of each step.
        heat: how often each expert was leased.
        num_experts: of the layer that has most.
    """

    def __init__(
        self, index: ExpertIndex, arena: Arena, policy: Policy, reader: Reader, active: int = 1
    ) -> None:
        """`arena` has a class of slots for each of `slot_classes(index)`; `reader` writes to it.

        No class is ever left with fewer than `active` slots.
        """
        self._index, self._arena, self._policy, self._reader = index, arena, policy, reader
        num_layers, self._num_experts, _ = index.file.shape
        self.num_experts = self._num_experts
        # 64 bits wide inside: NumPy has to convert other integers before it can index by them.
        self._slot_of: Numbers = np.full(num_layers * self._num_experts, _NOWHERE, np.int64)
        self._key_of: Keys = np.full(arena.num_slots, _NOWHERE, np.int64)
        self._leases: Ints = np.zeros(arena.num_slots, np.int32)
        self._ahead = ReadAhead(arena.num_slots)
        self._background = Background(arena.states, self._leases)
        self._predictions = Predictions(num_layers, self._num_experts)
        self.heat = Heat(num_layers * self._num_experts)
        self._records = RecordTable(index)
        self._classes = slot_classes(index)
        self._ranges = SlotRanges(self._classes, arena, active)
        self.between_tokens: Callable[[], None] = lambda: None
        self._last_row = -1
        self._requests = self._late = self._misses = self._evictions = 0
        self._prefetched = self._withdrawn = 0
        self._wait_s = 0.0
        self._lock = threading.RLock()
        self.table = Slots(arena.data, arena.parts, arena.states, self._wait, arena.biases)

    def lease(self, layer: int, experts: Ints) -> Lease:
        """Hold `experts [n]` (ascending, all different); the block gets their slots `[n]`.

        It begins at once: a slot may still be LOADING, its state word says so. All misses are read
        together, in file order. No leased slot is evicted or moved. Leases may be nested and may
        overlap.

        Entering raises:
            BudgetError: more experts than `capacity(layer)`, or than other leases leave.
            ReadError: the store is closed.
        """
        return Lease(partial(self._acquire, layer, experts), self._release)

    def capacity(self, layer: int) -> int:
        """The most experts that one lease of this layer can hold alone."""
        return len(self._ranges[self._index.position[layer]])

    def prefetch(self, layer: int, experts: Ints, origin: Origin = Origin.PREDICTED) -> int:
        """Begin to read those of `experts [n]` (all different, likeliest first) in no slot.

        A prefetch takes no lease and waits for nothing; its reads are in the order given. It gets
        at most half of the slots that nobody holds or is predicted to need within this token; the
        rest of it is refused. When the layer is leased, what was predicted in vain and is not there
        is called off. What is warmed gets free slots only and is read when there is nothing else
        to read. Returns how many reads began or came forward.
        """
        row = self._index.position[layer]
        keys = experts + np.int64(row * self._num_experts)
        with self._lock:
            slots = self._slot_of[keys]
            missing = keys[slots == _NOWHERE]
            if origin is Origin.WARMED:
                return self._read_ahead(row, missing[: len(self._free(row))], origin)
            self._predictions.add(row, keys)
            moved = self._reader.promote(self._background.among(slots), Queue.PREFETCH)
            if not len(missing):
                return moved
            most = spare = self._num_spare(row)
            if waiting := len(self._background.within(self._ranges[row])):
                most += waiting
                self._make_free(row, min(len(missing), most // 2))
                spare = self._num_spare(row)
            return moved + self._read_ahead(row, missing[: min(most // 2, spare)], origin)

    def _read_ahead(self, row: int, keys: Keys, origin: Origin) -> int:
        warmed = origin is Origin.WARMED
        slots = self._load(row, keys, Queue.BACKGROUND if warmed else Queue.PREFETCH)
        sizes = self._records.nbytes(row, keys - row * self._num_experts)
        self._ahead.begin(slots, sizes, origin)
        self._prefetched += len(slots)
        if warmed:
            self._background.add(slots)
        else:
            self._predictions.read(row, slots)
        return len(slots)

    def expect(self, layer: int, experts: Ints) -> None:
        """`experts [n]` will be needed within a token: the policy spares them if it can."""
        keys = experts + np.int64(self._index.position[layer] * self._num_experts)
        with self._lock:
            self._policy.hint(keys)

    def warm(self, counts: NDArray[np.float64]) -> int:
        """Begin to read the hottest experts by heat `[L, E]`, and all where all fit; how many.

        It goes into free slots, behind all other reads, and makes room while it waits.
        """
        accepted = 0
        for found in self._classes:
            num_slots = len(self._ranges[found.layers[0]])
            sizes = [self._index.layers[row].num_experts for row in found.layers]
            for row, experts in warm_order(counts, found.layers, sizes, num_slots):
                accepted += self.prefetch(self._index.layers[row].layer, experts, Origin.WARMED)
        return accepted

    def failure(self, slot: int) -> ColibriError:
        """The error to raise for a slot that is FAILED: it names file, offset, layer and expert."""
        row, expert = divmod(int(self._key_of[slot]), self._num_experts)
        return read_error(self._index, row, expert, self._reader.failure(slot))

    @property
    def stats(self) -> StoreStats:
        """A snapshot of the counters."""
        with self._lock:
            return StoreStats(
                requests=self._requests,
                hits=self._requests - self._misses,
                late=self._late,
                misses=self._misses,
                prefetched=self._prefetched,
                withdrawn=self._withdrawn,
                evictions=self._evictions,
                wait_s=self._wait_s,
                **self._reader.stats().by_name(),
                num_usable=self._ranges.num_usable,
                predicted=self._ahead.of(Origin.PREDICTED),
                warmed=self._ahead.of(Origin.WARMED),
            )

    def slot_states(self) -> list[dict[str, int]]:
        """What the usable slots of each class are at."""
        with self._lock:
            return self._ranges.states(self._leases)

    def queues(self) -> tuple[int, int, int, int]:
        """See `Reader.queues`."""
        return self._reader.queues()

    def close(self) -> None:
        """Cancel queued reads, wait for those in flight, give the memory back.

        Whoever still waits for a slot sees it FAILED. Closing twice is fine.
        """
        self._reader.close()
        with self._lock:
            self._slot_of[:] = _NOWHERE
            self._arena.states[:] = FAILED
            self._arena.close()

    @property
    def num_reads(self) -> int:
        """Records asked of the reader so far; those that it was hurried on with count again."""
        return self._misses + self._prefetched + self._late

    @property
    def num_usable(self) -> int:
        """Slots that are not retired."""
        return self._ranges.num_usable

    @property
    def slots_bytes(self) -> int:
        """Of all slots, retired ones included."""
        return int(self._arena.data.size)

    @property
    def retired_bytes(self) -> int:
        """Of those that are retired."""
        return self._ranges.retired_bytes

    @property
    def untouched_bytes(self) -> int:
        """What usable slots will take when records first land in them."""
        return self._ranges.untouched_bytes

    def retire(self, nbytes: int) -> int:
        """Evict from slots at the tail, `nbytes` if so many are idle, and give their memory back.

        Nothing is read in the background then. Returns how many slots went, until `take_back`.
        """
        with self._lock:
            self._withdraw(self._background.slots)
            idle = (self._leases == 0) & (self._arena.states != LOADING)
            slots = self._ranges.shrink(nbytes, idle)
            self._evictions += int(np.count_nonzero(self._key_of[slots] != _NOWHERE))
            self._vacate(slots)
            self._arena.discard(slots)
        return len(slots)

    def take_back(self, nbytes: int) -> None:
        """Use retired slots of at most `nbytes` again."""
        with self._lock:
            self._ranges.grow(nbytes)

    def _acquire(self, layer: int, experts: Ints, pins: list[Numbers]) -> Numbers:
        row = self._index.position[layer]
        keys = experts + np.int64(row * self._num_experts)
        late = misses = 0
        if row <= self._last_row:
            self.between_tokens()
        with self._lock:
            for ended, read in self._predictions.end(row, self._last_row):
                self._call_off(ended, read, keys)
            self._last_row = row
            slots: Numbers = self._slot_of[keys]
            states = self._arena.words[slots]
            if np.count_nonzero(states == READY) == len(slots):
                self._leases[slots] += 1
                pins.append(slots)
                self._policy.touch(keys, self._ahead.use(slots))
            else:
                slots, late, misses = self._admit(row, keys, slots, states, pins)
            self.heat.touch(keys)
            self._requests, self._misses = self._requests + len(keys), self._misses + misses
            self._late += late
        return slots

    def _admit(
        self, row: int, keys: Keys, slots: Numbers, states: Ints, pins: list[Numbers]
    ) -> tuple[Numbers, int, int]:
        """Pin what is there, read what is not; returns slots, how many were late, and missed."""
        failed, loading = states == FAILED, states == LOADING
        late = slots[loading]
        # Another lease may still hold a slot that failed: it stays as it is, this one tries again.
        self._slot_of[keys[failed]] = _NOWHERE
        present = (states == READY) | loading
        held = slots[present]
        self._leases[held] += 1
        pins.append(held)
        if len(late):
            self._reader.promote(late)
        missing = keys[~present]
        # What was read ahead had not been kept since its last use either.
        ahead = self._ahead.use(held, loading[present])
        self._policy.touch(keys, len(missing) + ahead)
        slots[~present] = new = self._load(row, missing, Queue.DEMAND)
        self._leases[new] += 1
        pins.append(new)
        return slots, len(late), len(new)

    def _call_off(self, row: int, slots: Numbers, keys: Keys) -> None:
        """`slots` were read into for a turn of `row`, which wants `keys` or will not come at all.

        Gives back those that are of no use and have not landed.
        """
        slots = slots[(self._arena.states[slots] == LOADING) & (self._leases[slots] == 0)]
        if not len(slots):
            return
        owners, wanted = self._key_of[slots].tolist(), set(keys.tolist())
        vain = [o // self._num_experts == row and o not in wanted for o in owners]
        self._withdraw(np.unique(slots[vain]))  # a read that failed leaves its slot to the next

    def _withdraw(self, slots: Numbers) -> None:
        """Give back those of `slots [n]` that wait, not on demand."""
        if not len(slots):
            return
        called_off = slots[self._reader.withdraw(slots)]
        self._withdrawn += len(called_off)
        self._ahead.withdraw(called_off)
        self._disown(called_off)  # some are FAILED only when a read that is under way has ended
        self._vacate(called_off[self._arena.states[called_off] == FAILED])

    def _load(self, row: int, keys: Keys, queue: Queue) -> Numbers:
        """Slots `[n]` for `keys [n]`, which have none; their reads are submitted."""
        if not len(keys):
            return np.empty(0, np.int64)
        slots = self._claim(row, len(keys))
        try:
            experts = keys - row * self._num_experts
            bases = self._arena.bases[slots]
            self._arena.parts[slots] = self._records.parts(row, experts, bases)
            if self._arena.biases is not None:
                self._arena.biases[slots] = self._records.biases(row, bases)
            self._key_of[slots] = keys
            self._slot_of[keys] = slots
            if queue is not Queue.BACKGROUND:  # which may not be read for long
                self._arena.touched[slots] = True
            self._reader.submit(self._records.jobs(row, experts, slots, self._arena.bases, queue))
        except BaseException:
            self._vacate(slots[self._arena.states[slots] == EMPTY])  # those that were not submitted
            raise
        return slots

    def _claim(self, row: int, n: int) -> Numbers:
        """`n` slots that nobody holds, now EMPTY: free ones, then the policy's victims'."""
        self._make_free(row, n)
        idle = self._ranges.idle(row, self._leases)
        while len(idle) < n:
            self._await_abandoned(row, n, len(idle))
            idle = self._ranges.idle(row, self._leases)
        self._vacate(idle[self._arena.states[idle] == FAILED])
        keys = self._key_of[idle]
        free: Numbers = idle[keys == _NOWHERE]
        owned: Numbers = idle[keys != _NOWHERE]
        if n <= len(free):
            return free[:n]
        chosen = self._predictions.victims(n - len(free), self._key_of[owned], self._policy)
        victims: Numbers = owned[chosen]
        self._evictions += len(victims)
        self._vacate(victims)
        both: Numbers = np.concatenate([free, victims])
        return both

    def _make_free(self, row: int, n: int) -> None:
        """Call off reads in the background where fewer than `n` slots are free."""
        waiting = self._background.within(self._ranges[row])
        wanted = min(n - len(self._free(row)), len(waiting)) if len(waiting) else 0
        if wanted > 0:
            self._withdraw(waiting[self._policy.victims(wanted, self._key_of[waiting])])

    def _free(self, row: int) -> Numbers:
        """Idle slots for records of this layer that hold nothing of use."""
        idle = self._ranges.idle(row, self._leases)
        found: Numbers = idle[(self._key_of[idle] < 0) | (self._arena.states[idle] == FAILED)]
        return found

    def _num_spare(self, row: int) -> int:
        """Idle slots that hold nothing which this token is predicted to need."""
        idle = self._ranges.idle(row, self._leases)
        held = idle[(self._key_of[idle] != _NOWHERE) & (self._arena.states[idle] != FAILED)]
        return len(idle) - self._predictions.count(self._key_of[held])

    def _await_abandoned(self, row: int, n: int, num_idle: int) -> None:
        """Wait for a read whose slot nobody holds: a prefetch, or that of a lease cut short."""
        slots = self._ranges[row]
        window = slice(slots.start, slots.stop)
        loading = (self._leases[window] == 0) & (self._arena.states[window] == LOADING)
        if loading.any():
            self._reader.wait(slots.start + int(loading.argmax()))
        elif self._ranges.extend(row, n - num_idle):
            return  # the lease was measured by a `capacity` that has shrunk since
        elif len(self._ranges.idle(row, self._leases)) == num_idle:  # none has landed meanwhile
            raise too_many(self._index.layers[row].layer, n, num_idle, len(slots))

    def _vacate(self, slots: Numbers) -> None:
        """Make slots EMPTY and their experts homeless, unless those live elsewhere by now."""
        self._disown(slots)
        self._ahead.drop(slots, self._arena.states[slots] == FAILED)
        self._arena.states[slots] = EMPTY

    def _disown(self, slots: Numbers) -> None:
        keys = self._key_of[slots]
        theirs = (keys != _NOWHERE) & (self._slot_of[keys] == slots)
        self._slot_of[keys[theirs]] = _NOWHERE
        self._key_of[slots] = _NOWHERE

    def _release(self, pins: list[Numbers]) -> None:
        with self._lock:
            while pins:  # no call stands between the two statements, so Ctrl-C cannot either
                self._leases[pins[-1]] -= 1
                del pins[-1]

    def _wait(self, slot: int) -> None:
        start = time.perf_counter()
        self._reader.wait(slot)  # even if it is there: only then has this thread seen all of it
        self._wait_s += time.perf_counter() - start
