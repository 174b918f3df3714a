"""The metrics of an Interlock as Prometheus reads them."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

from interlock import Interlock

Samples = Mapping[str, Mapping[frozenset[tuple[str, str]], float]]


def scraped(text: bytes) -> Samples:
    """What Prometheus itself would read. Its Python client calls every counter `…_total`, however it is written."""
    found: dict[str, dict[frozenset[tuple[str, str]], float]] = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample_ in family.samples:
            found.setdefault(sample_.name.removesuffix("_total"), {})[frozenset(sample_.labels.items())] = sample_.value
    return found


def of(samples: Samples, name: str, **labels: str) -> float:
    return samples[name][frozenset(labels.items())]


async def render(app: Interlock) -> Samples:
    return scraped(await app.telemetry.metrics.render())
