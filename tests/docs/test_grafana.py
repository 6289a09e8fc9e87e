"""docs/guides/grafana.json: a dashboard that Grafana can import, and whose every metric is one of
the server's.
"""

from __future__ import annotations

import json
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from _generate import server

FILE = Path(__file__).parents[2] / "docs" / "guides" / "grafana.json"
BOARD: dict[str, Any] = json.loads(FILE.read_text("utf-8"))
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
SUFFIXES = {
    "counter": ("_total",),
    "histogram": ("_bucket", "_sum", "_count"),
    "gauge": ("",),
    "info": ("_info",),
}
# labels of a scrape, of a cluster's page, of buckets
FROM_PROMETHEUS = {"instance", "replica", "le"}
WORDS = {"sum", "max", "by", "rate", "histogram_quantile", "scalar", "label_values"}
UNITS = {"short", "s", "percentunit"}


def exposed() -> dict[str, set[str]]:
    """Every name of a sample that the server can give, with its labels."""
    return {
        metric.name + suffix: set(metric.labels)
        for metric in server.metrics()
        for suffix in SUFFIXES[metric.kind]
    }


def metric_names(expression: str) -> set[str]:
    """The metrics that an expression of PromQL reads."""
    plain = re.sub(r"\{[^}]*\}|\[[^\]]*\]|\bby \([^)]*\)", "", expression)
    return set(re.findall(r"[A-Za-z_:][\w:]*", plain)) - WORDS


def wrong_labels(expression: str, labels_of: dict[str, set[str]]) -> set[str]:
    """Labels of selectors and of `by` that no metric of the expression has."""
    used = set(re.findall(r"(\w+)\s*=~?\s*\"", expression))
    used |= {
        label
        for names in re.findall(r"\bby \(([^)]*)\)", expression)
        for label in re.split(r",\s*", names)
    }
    return (
        used
        - FROM_PROMETHEUS
        - set().union(*(labels_of[name] for name in metric_names(expression)))
    )


def expressions() -> list[str]:
    variables = [
        variable["definition"]
        for variable in BOARD["templating"]["list"]
        if variable["type"] == "query"
    ]
    # the second argument of label_values is a label
    reads = [re.sub(r",\s*\w+\)$", ")", text) for text in variables]
    return [target["expr"] for panel in PANELS for target in panel["targets"]] + reads


def overlap(a: dict[str, int], b: dict[str, int]) -> bool:
    apart = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
    return not (apart or a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"])


def test_the_dashboard_has_the_form_of_an_import():
    (data_source,) = BOARD["__inputs"]
    assert (data_source["name"], data_source["type"], data_source["pluginId"]) == (
        "DS_PROMETHEUS",
        "datasource",
        "prometheus",
    )
    assert (BOARD["id"], BOARD["schemaVersion"]) == (None, 39)
    assert {panel["type"] for panel in BOARD["panels"]} - {"row"} <= {
        required["id"] for required in BOARD["__requires"] if required["type"] == "panel"
    }
    variables = {variable["name"]: variable for variable in BOARD["templating"]["list"]}
    assert list(variables) == ["datasource", "model", "instance", "replica"]
    assert variables["datasource"]["current"]["value"] == "${DS_PROMETHEUS}"
    sources = [part["datasource"] for panel in PANELS for part in (panel, *panel["targets"])]
    sources += [
        variable["datasource"] for variable in variables.values() if variable["type"] == "query"
    ]
    assert all(source == {"type": "prometheus", "uid": "${datasource}"} for source in sources)
    for target in [target for panel in PANELS for target in panel["targets"]]:
        assert set(re.findall(r"\$(\w+)", target["expr"])) - {"__rate_interval"} <= set(variables)


@pytest.mark.parametrize("expression", expressions())
def test_every_metric_is_one_of_the_servers(expression: str):
    labels_of = exposed()
    assert metric_names(expression)
    assert metric_names(expression) - set(labels_of) == set()
    assert wrong_labels(expression, labels_of) == set()
    for opening, closing in ("()", "{}", "[]"):
        assert expression.count(opening) == expression.count(closing)


def test_every_panel_says_what_it_shows():
    for panel in PANELS:
        assert panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS, panel["title"]
        assert re.match(r"[A-Za-z].{20,}\.$", panel["description"]), panel["title"]
        assert [target["refId"] for target in panel["targets"]] == list(
            "ABCDEF"[: len(panel["targets"])]
        )
    titles = [panel["title"] for panel in BOARD["panels"]]
    assert len(set(titles)) == len(titles)


def test_panels_have_their_own_ids_and_places():
    ids = [panel["id"] for panel in BOARD["panels"]]
    assert len(set(ids)) == len(ids)
    places = [panel["gridPos"] for panel in BOARD["panels"]]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    assert [pair for pair in combinations(places, 2) if overlap(*pair)] == []


def test_what_is_asked_of_a_server_is_there():
    """Each of these is in some panel."""
    read = set().union(*map(metric_names, expressions()))
    names = """num_requests_running num_requests_waiting generation_tokens_total time_to_first_token_seconds_bucket
    inter_token_latency_seconds_bucket e2e_request_latency_seconds_bucket kv_cache_usage_perc prefix_cache_hits_total
    num_preemptions_total spec_decode_num_accepted_tokens_total missing_programs"""
    assert {f"pagedjax:{name}" for name in names.split()} - read == set()


def test_wrong_expressions_are_seen():
    labels_of = exposed()
    wrong = 'sum by (instance) (rate(pagedjax:no_such_total{model_name=~"$model"}[5m]))'
    assert metric_names(wrong) == {"pagedjax:no_such_total"}
    assert metric_names("histogram_quantile(0.5, sum by (le) (rate(a_bucket[1m])))") == {"a_bucket"}
    assert wrong_labels('sum by (colour) (pagedjax:missing_programs{size="1"})', labels_of) == {
        "colour",
        "size",
    }
    assert overlap({"x": 0, "y": 0, "w": 8, "h": 8}, {"x": 7, "y": 7, "w": 8, "h": 8})
    assert not overlap({"x": 0, "y": 0, "w": 8, "h": 8}, {"x": 8, "y": 0, "w": 8, "h": 8})
