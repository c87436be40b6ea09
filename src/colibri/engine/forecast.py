"""How long a pass of so many rows will take, from what passes took before."""

from __future__ import annotations

_MEMORY = 0.5  # weight of the newest observation
_STEP = 2  # a pass may have so many times the rows of the largest one that is known
_CALM = 0.95  # of the lateness of earlier passes, what counts after another one
_MOST_LATE = 2.0


class PassForecast:
    """Seconds by number of rows, in classes that double; the newest observations count most.

    Time grows with rows, but by less and less for each: rows share experts. So beyond the largest
    class that is known it is at most proportional, and between two classes at most linear. Passes
    that took longer than was expected make the next ones smaller, for a while: reads and attention
    vary, and a reply that waits has no use for the average.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[float, float]] = {}  # class -> rows, seconds
        self._late = 1.0  # passes took so many times what was expected, at worst and lately

    def observe(self, rows: int, seconds: float) -> None:
        """A pass of `rows` took so long."""
        expected, size = self.seconds(rows), rows.bit_length()
        if expected and size in self._known:
            calmer = 1.0 + _CALM * (self._late - 1.0)
            self._late = min(_MOST_LATE, max(calmer, seconds / expected))
        before = self._known.get(size)
        if before is not None:
            rows_before, seconds_before = before
            self._known[size] = (
                rows_before + _MEMORY * (rows - rows_before),
                seconds_before + _MEMORY * (seconds - seconds_before),
            )
        else:
            self._known[size] = float(rows), seconds

    def seconds(self, rows: int) -> float | None:
        """Of a pass of `rows`; None before anything is known."""
        points = sorted(self._known.values())
        if not points:
            return None
        if rows >= points[-1][0]:
            return points[-1][1] * rows / points[-1][0]
        below = (0.0, 0.0)
        for point in points:
            if rows <= point[0]:
                share = (rows - below[0]) / (point[0] - below[0])
                return below[1] + share * (point[1] - below[1])
            below = point
        raise AssertionError("unreachable")

    def rows_within(self, seconds: float, least: int, most: int) -> int:
        """The most rows, from `least` to `most`, that should take so long at most.

        No more than twice as many as were ever measured: what is new is approached step by step.
        """
        known = max((rows for rows, _ in self._known.values()), default=0.0)
        low, high = least, max(least, min(most, int(_STEP * known)))
        while low < high:
            middle = (low + high + 1) // 2
            forecast = self.seconds(middle)
            if forecast is not None and forecast * self._late <= seconds:
                low = middle
            else:
                high = middle - 1
        return min(low, most)
