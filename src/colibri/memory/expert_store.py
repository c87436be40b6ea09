"""Hands out experts to compute with, whichever tier they were in.

Bookkeeping is a few arrays (`slot_book`) and the reader's state words. A hit is a look-up in them.
They are consistent at each step, so that Ctrl-C may come anywhere: an expert may be forgotten, but
no slot has two owners, none is LOADING without a job.
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
from colibri.kernels.api import EMPTY, FAILED, LOADING, Ints, Slots
from colibri.memory.arena import Arena
from colibri.memory.eviction import Keys, Policy
from colibri.memory.heat import Heat, warm_order
from colibri.memory.jobs import Queue, Reader
from colibri.memory.lease import Lease, Numbers
from colibri.memory.predictions import Predictions
from colibri.memory.read_ahead import Background, Origin
from colibri.memory.read_errors import read_error, too_many
from colibri.memory.record_table import RecordTable
from colibri.memory.slot_book import NOWHERE, Room, SlotBook
from colibri.memory.slot_classes import slot_classes
from colibri.memory.slot_ranges import SlotRanges
from colibri.memory.store_stats import StoreStats


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
        self._book = book = SlotBook(num_layers * self._num_experts, arena)
        self._slot_of, self._key_of, self._leases = book.slot_of, book.key_of, book.leases
        self._ahead = book.ahead
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
        numbers: list[int] = keys.tolist()
        with self._lock:
            slots = [self._book.where[key] for key in numbers]
            missing = [key for key, slot in zip(numbers, slots, strict=True) if slot == NOWHERE]
            if origin is Origin.WARMED:
                return self._read_ahead(row, missing[: len(self._free(row))], origin)
            self._predictions.add(row, keys)
            moved = self._hurry(slots)
            if not missing:
                return moved
            room = self._book.idle(self._ranges, row)
            most = spare = self._num_spare(room)
            if waiting := len(self._background.within(self._ranges[row])):
                most += waiting
                self._make_free(row, min(len(missing), most // 2))
                room = self._book.idle(self._ranges, row)
                spare = self._num_spare(room)
            return moved + self._read_ahead(row, missing[: min(most // 2, spare)], origin, room)

    def _hurry(self, slots: list[int]) -> int:
        """Read those of `slots` that wait in the background with what is predicted; how many."""
        if not len(self._background.slots):
            return 0
        waiting = self._background.among(np.array(slots, np.int64))
        return self._reader.promote(waiting, Queue.PREFETCH)

    def _read_ahead(
        self, row: int, keys: list[int], origin: Origin, room: Room | None = None
    ) -> int:
        if not keys:
            return 0
        warmed = origin is Origin.WARMED
        slots = self._load(row, keys, Queue.BACKGROUND if warmed else Queue.PREFETCH, room)
        sizes = self._records.nbytes(row, np.array(keys) - row * self._num_experts)
        self._ahead.begin(slots, sizes.tolist(), origin)
        self._prefetched += len(slots)
        if warmed:
            self._background.add(np.array(slots, np.int64))
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
            self._slot_of[:] = NOWHERE
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
            self._evictions += int(np.count_nonzero(self._key_of[slots] != NOWHERE))
            self._book.vacate(slots.tolist())
            self._arena.discard(slots)
        return len(slots)

    def take_back(self, nbytes: int) -> None:
        """Use retired slots of at most `nbytes` again."""
        with self._lock:
            self._ranges.grow(nbytes)

    def _acquire(self, layer: int, experts: Ints, pins: list[int]) -> list[int]:
        row = self._index.position[layer]
        keys = experts + np.int64(row * self._num_experts)
        numbers: list[int] = keys.tolist()
        late = misses = 0
        if row <= self._last_row:
            self.between_tokens()
        with self._lock:
            for ended, read in self._predictions.end(row, self._last_row):
                self._call_off(ended, read, numbers)
            self._last_row = row
            slots = [self._book.where[key] for key in numbers]
            if self._book.all_ready(slots):
                self._book.pin(slots, pins)
                self._policy.touch(keys, self._ahead.use(slots))
            else:
                late, misses = self._admit(row, keys, slots, pins)
            self.heat.touch(keys)
            self._requests, self._misses = self._requests + len(keys), self._misses + misses
            self._late += late
        return slots

    def _admit(self, row: int, keys: Keys, slots: list[int], pins: list[int]) -> tuple[int, int]:
        """Pin what is there, read what is not, into `slots`; how many were late, and missed."""
        held, loading, missing = self._book.split(slots)
        self._book.pin(held, pins)
        if late := [slot for slot, waits in zip(held, loading, strict=True) if waits]:
            self._reader.promote(np.array(late))
        # What was read ahead had not been kept since its last use either.
        self._policy.touch(keys, len(missing) + self._ahead.use(held, loading))
        new = self._load(row, keys[missing].tolist(), Queue.DEMAND)
        self._book.pin(new, pins)
        for place, slot in zip(missing, new, strict=True):
            slots[place] = slot
        return len(late), len(missing)

    def _call_off(self, row: int, slots: list[int], keys: list[int]) -> None:
        """`slots` were read into for a turn of `row`, which wants `keys` or will not come at all.

        Gives back those that are of no use and have not landed.
        """
        first = row * self._num_experts
        vain = self._book.in_vain(slots, first, first + self._num_experts, keys)
        if vain:  # a read that failed leaves its slot to the next
            self._withdraw(np.array(vain))

    def _withdraw(self, slots: Numbers) -> None:
        """Give back those of `slots [n]` that wait, not on demand."""
        if not len(slots):
            return
        called_off: list[int] = slots[self._reader.withdraw(slots)].tolist()
        self._withdrawn += len(called_off)
        self._ahead.withdraw(called_off)
        for slot in called_off:
            self._book.disown(slot)  # some are FAILED only when a read that is under way has ended
        self._book.vacate([slot for slot in called_off if self._book.words[slot] == FAILED])

    def _load(self, row: int, keys: list[int], queue: Queue, room: Room | None = None) -> list[int]:
        """Slots for `keys`, which have none; their reads are submitted. `room`: what is idle."""
        if not keys:
            return []
        slots = self._claim(row, len(keys), room)
        try:
            self._place(row, np.array(keys), np.array(slots), queue)
        except BaseException:  # those that were not submitted
            self._book.vacate([slot for slot in slots if self._book.words[slot] == EMPTY])
            raise
        return slots

    def _place(self, row: int, keys: Keys, slots: Numbers, queue: Queue) -> None:
        experts, bases = keys - row * self._num_experts, self._arena.bases[slots]
        self._arena.parts[slots] = self._records.parts(row, experts, bases)
        if self._arena.biases is not None:
            self._arena.biases[slots] = self._records.biases(row, bases)
        self._key_of[slots] = keys
        self._slot_of[keys] = slots
        if queue is not Queue.BACKGROUND:  # which may not be read for long
            self._arena.touched[slots] = True
        self._reader.submit(self._records.jobs(row, experts, slots, self._arena.bases, queue))

    def _claim(self, row: int, n: int, room: Room | None) -> list[int]:
        """`n` slots that nobody holds, now EMPTY: free ones, then the policy's victims'."""
        if self._make_free(row, n):
            room = None
        idle, owners = room or self._book.idle(self._ranges, row)
        while len(idle) < n:
            self._await_abandoned(row, n, len(idle))
            idle, owners = self._book.idle(self._ranges, row)
        has_owner = owners != NOWHERE
        free: list[int] = idle[~has_owner].tolist()
        if n > len(free):
            owned, theirs = idle[has_owner], owners[has_owner]
            chosen = self._predictions.victims(n - len(free), theirs, self._policy)
            victims: list[int] = owned[chosen].tolist()
            self._evictions += len(victims)
            self._book.vacate(victims)
            free += victims
        return free[:n]

    def _make_free(self, row: int, n: int) -> bool:
        """Call off reads in the background where fewer than `n` slots are free; whether it did."""
        waiting = self._background.within(self._ranges[row])
        wanted = min(n - len(self._free(row)), len(waiting)) if len(waiting) else 0
        if wanted > 0:
            self._withdraw(waiting[self._policy.victims(wanted, self._key_of[waiting])])
        return wanted > 0

    def _free(self, row: int) -> Numbers:
        """Idle slots for records of this layer that hold nothing of use."""
        idle, owners = self._book.idle(self._ranges, row)
        found: Numbers = idle[owners == NOWHERE]
        return found

    def _num_spare(self, room: Room) -> int:
        """Idle slots that hold nothing which this token is predicted to need."""
        idle, owners = room
        return len(idle) - self._predictions.count(owners[owners != NOWHERE])

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

    def _release(self, pins: list[int]) -> None:
        with self._lock:
            self._book.unpin(pins)

    def _wait(self, slot: int) -> None:
        start = time.perf_counter()
        self._reader.wait(slot)  # even if it is there: only then has this thread seen all of it
        self._wait_s += time.perf_counter() - start
