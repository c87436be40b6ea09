"""Weights of blocks under test: every tensor is told apart by its number."""

import math
from collections.abc import Iterable

import numpy as np

from colibri.formats import F32, Floats
from colibri.kernels.api import Matrix
from colibri.nn.parameter import Parameter, Rows


class NumberedWeights:
    """Serves exactly the announced parameters; the nth is filled with n + 1."""

    def __init__(self, parameters: Iterable[Parameter]) -> None:
        self._shapes = {p.name: p.shape for p in parameters}
        self.numbers = {name: n + 1 for n, name in enumerate(self._shapes)}
        self.asked: set[str] = set()

    def vector(self, name: str) -> Floats:
        """A vector of its number."""
        self.asked.add(name)
        return np.full(math.prod(self._shapes[name]), self.numbers[name], np.float32)

    def matrix(self, name: str, bias: str | None = None) -> Matrix:
        """A matrix of its number."""
        self.asked.add(name)
        rows, columns = self._shapes[name]
        data = F32.encode(np.full((rows, columns), self.numbers[name], np.float32))
        return Matrix(F32, rows, columns, data, None if bias is None else self.vector(bias))

    def number(self, found: Matrix) -> int:
        """Which tensor a matrix was made of."""
        return int(found.data.view(np.float32)[0])

    def table(self, name: str) -> Rows:
        """None of the blocks under test has one."""
        raise KeyError(name)
