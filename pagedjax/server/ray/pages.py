"""The metrics of all replicas as one page of Prometheus's: each sample has the label `replica`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import prometheus_client as prometheus
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families


def merged_page(pages: Mapping[str, str]) -> str:
    """One page with the samples of all pages; `pages` are those of the replicas, by name."""
    families: dict[str, Metric] = {}
    for replica, page in pages.items():
        for family in text_string_to_metric_families(page):
            empty = Metric(family.name, family.documentation, family.type)
            families.setdefault(family.name, empty).samples += [
                sample._replace(labels={**sample.labels, "replica": replica})
                for sample in family.samples
            ]
    return prometheus.generate_latest(_Page(families.values())).decode()  # type: ignore[arg-type]


class _Page:
    """A registry for `generate_latest`."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families
