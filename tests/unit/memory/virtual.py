"""Decoding on the null tier with a virtual clock: routes, predictions and times are made up."""

from dataclasses import dataclass

import numpy as np

from colibri.memory.arena import Arena
from colibri.memory.expert_store import ExpertStore
from colibri.memory.governor import Governor
from colibri.memory.null import VirtualDisk
from colibri.memory.policies import make_policy
from colibri.memory.prefetch import Prefetcher, PrefetchMode
from colibri.memory.slot_classes import slot_classes
from tests.unit.memory.records import bare_index


@dataclass(frozen=True)
class Decoding:
    """Shape and times of a made-up model; times in seconds.

    Attributes:
        share: of all experts, that fit.
        recall: of the predictor, the one two layers ahead being right half as often as not when
            this one is.
        record_s: to read a record.
        blocks: that it is read in.
        expert_s: to compute an expert.
        attention_s: before each layer's experts.
        predict_s: to work out a prediction.
        sticky: chance that an expert is used by the next token as well.
    """

    layers: int = 12
    experts: int = 32
    active: int = 4
    share: float = 0.25
    recall: float = 0.9
    record_s: float = 1.0
    blocks: int = 4
    expert_s: float = 0.1
    attention_s: float = 0.2
    predict_s: float = 0.01
    sticky: float = 0.5
    seed: int = 0

    def routes(self, tokens: int) -> list[list[np.ndarray]]:
        """Experts of each layer of each token: skewed, and like those of the token before."""
        random = np.random.default_rng(self.seed)
        shares = 1 / np.arange(1, self.experts + 1) ** 0.8
        shares /= shares.sum()
        orders = [random.permutation(self.experts) for _ in range(self.layers)]
        last = [np.empty(0, int)] * self.layers
        found = []
        for _ in range(tokens):
            for layer, order in enumerate(orders):
                kept = last[layer][random.random(len(last[layer])) < self.sticky]
                new = random.choice(self.experts, self.experts, replace=False, p=shares)
                drawn = [e for e in order[new] if e not in kept]
                chosen = np.array([*kept, *drawn][: self.active], int)
                last[layer] = chosen
            found.append([np.sort(chosen).astype(np.int32) for chosen in last])
        return found

    def decode(
        self, mode: PrefetchMode, tokens: int = 300, governor: Governor | None = None
    ) -> tuple[list[float], Prefetcher, ExpertStore]:
        """Seconds of each token, and what decoded them."""
        index = bare_index([1] * self.layers, self.experts)
        num_slots = int(self.share * self.layers * self.experts)
        arena = Arena([found.slot_nbytes for found in slot_classes(index)], [num_slots])
        disk = VirtualDisk(arena, self.record_s, self.blocks)
        shape = self.layers, self.experts
        policy = make_policy("mixed", shape, self.active, [range(self.layers)], [num_slots])
        store = ExpertStore(index, arena, policy, disk, self.active)
        ahead = Prefetcher(store, range(self.layers), mode, governor, lambda: disk.now)
        random = np.random.default_rng(self.seed + 1)
        times = []
        for token in self.routes(tokens):
            start = disk.now
            looks = ahead.begin(1)
            for layer, used in enumerate(token):
                disk.work(self.attention_s)

                def predict(
                    later: int, layer: int = layer, token: list[np.ndarray] = token
                ) -> np.ndarray:
                    disk.work(self.predict_s)
                    recall = self.recall ** (later - layer)
                    right = token[later][random.random(self.active) < recall]
                    others = np.setdiff1d(np.arange(self.experts), token[later])
                    wrong = random.choice(others, self.active - len(right), replace=False)
                    order = random.random(self.active) - np.arange(self.active) / self.active
                    return np.concatenate([right, wrong])[np.argsort(-order)].astype(np.int32)

                with store.lease(layer, used) as slots:
                    if looks:
                        ahead.look(layer, used, predict)
                    for slot in slots[np.argsort(store.table.states[slots] != 2)].tolist():
                        store.table.wait(slot)
                        disk.work(self.expert_s)
            if looks:
                ahead.end()
            times.append(disk.now - start)
        return times, ahead, store
