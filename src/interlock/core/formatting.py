"""Formats spans of time and amounts for people."""

from __future__ import annotations

_SPANS = ((86_400_000, "d"), (3_600_000, "h"), (60_000, "min"), (1000, "s"))


def span(ms: float) -> str:
    """Format a duration with its two largest units: 23 h 59 min, 55 s, 250 ms."""
    left = max(int(ms), 0)
    if 0 < left < 1000:
        return f"{left} ms"
    sizes = [(size, unit) for size, unit in _SPANS if left >= size][:2]
    words: list[str] = []
    for size, unit in sizes:
        count, left = divmod(left, size)
        words += [f"{count} {unit}"] if count else []
    return " ".join(words) or "0 s"


def wait(ms: int) -> str:
    """Format a time to wait, rounded up so that it is never too short."""
    return span(ms if ms < 1000 else -(-ms // 1000) * 1000)


def quantity(value: float) -> str:
    """Format a cost in full, down to a millionth: 0.000001, 2500000."""
    return f"{value:.6f}".rstrip("0").rstrip(".")
