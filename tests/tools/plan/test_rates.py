"""Shipped rates are those of the result files; a layer has those of the nearest measured one; what is not known is
refused."""

import itertools
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import benchmarks
from moba_train.attention.registry import KINDS
from moba_train.config.attention import LayerAttention
from moba_train.errors import PlanError
from moba_train.memory.devices import Gpu
from moba_train.memory.flops import layer_flops
from moba_train.tools.plan.rates import (
    MEASURED_MODEL,
    AttentionRate,
    MeasuredLayer,
    named_gpu,
    read_rates,
    shipped_rates,
)

RESULTS = Path(benchmarks.__file__).parent / "results"
H200 = shipped_rates(named_gpu("h200"))
KERNELS = {"auto": ("flash-attn-4", "flash4"), "cudnn": ("cuDNN", "cudnn"), "flash": ("FlashAttention-2", "flash2")}


def layer(kind: str, **options: Any) -> LayerAttention:
    return LayerAttention(kind, KINDS[kind].Options.model_validate(options))


def results(*names: str) -> list[dict[str, Any]]:
    return [row for name in names for row in json.loads((RESULTS / f"{name}.json").read_text())["results"]]


def measured() -> Iterator[MeasuredLayer]:
    """Every layer of the result files that the shipped file could have, under the same names."""
    for row in results("full-attention-h200"):
        for backend, (kernel, _) in KERNELS.items():
            if len(row["lengths"]) == 1:
                yield timed("full", {"backend": backend}, 128, row["lengths"][0], row["kernels"][kernel])
    for row in results("attention-gradients-gathered-h200-again"):
        tokens, block_size, topk = (int(part) for part in re.findall(r"\d+", row["row"]))
        found = row["gathered" if block_size == 128 else "one pass"]
        both, backward = (float(found[key]["median"]) for key in ("both_ms", "backward_ms"))
        forward = {"median": both - backward}
        options = {"block_size": block_size, "topk": topk}
        yield timed("moba", options, 128, 1024 * tokens, {"forward_ms": forward, "both_ms": found["both_ms"]})
    for row in results("attention-h200-877fb6e", "attention-long-blocks-h200", "attention-gluon-h200"):
        if row["heads"] == 32 and row["documents"] == "" and row["routing"] in ("random", "uniform"):
            options = {"block_size": row["block_size"], "topk": row["topk"]}
            yield timed("moba", options, row["head_dim"], row["tokens"], row["columns"]["auto"])
            for backend, (_, kernel) in KERNELS.items():
                if kernel in row["columns"]:
                    found = row["columns"][kernel]
                    yield timed("full", {"backend": backend}, row["head_dim"], row["tokens"], found)
    for row in results("mechanisms-h200"):
        for names in ((), ("mode",), ("block_size", "topk")):
            if "both_ms" in row and set(names) <= row["options"].keys():
                yield timed(row["kind"], {name: row["options"][name] for name in names}, 64, row["tokens"], row)
    for row in results("distilled-every-h200", "distilled-groups-h200"):
        if row["kind"] in ("msa", "seer"):
            usual = KINDS[row["kind"]].Options()
            others = (name for name in ("index_keys", "kl_every") if name in row["options"])
            given = {name: row["options"][name] for name in others if row["options"][name] != getattr(usual, name)}
            yield timed(row["kind"], {"mode": row["options"]["mode"], **given}, 64, row["tokens"], row)
    for row in results("windows-h200"):
        if row["kind"] == "window":
            yield timed("window", {name: row["options"][name] for name in ("window", "sinks")}, 64, row["tokens"], row)


def timed(kind: str, options: dict[str, Any], head_dim: int, tokens: int, found: dict[str, Any]) -> MeasuredLayer:
    times = (float(f"{found[key]['median']:.4g}") for key in ("forward_ms", "both_ms"))
    forward_ms, both_ms = times
    return MeasuredLayer(
        kind=kind, options=options, head_dim=head_dim, tokens=tokens, forward_ms=forward_ms, both_ms=both_ms
    )


def test_every_number_is_that_of_a_result_file() -> None:
    files = list(measured())
    assert [row for row in H200.attention if row not in files] == []
    keys = [(row.kind, str(row.options), row.head_dim, row.tokens) for row in H200.attention]
    assert len(set(keys)) == len(keys)


def test_a_rate_is_that_of_the_measured_layer_or_of_the_nearest() -> None:
    full = H200.attention_rate(layer("full"), 128, 65536)
    assert full.both == pytest.approx(12 * 32 * 128 * 65536**2 / 2 / 0.208, rel=1e-6)
    assert full.forward == pytest.approx(4 * 32 * 128 * 65536**2 / 2 / 0.05889, rel=1e-6)
    assert H200.attention_rate(layer("full", backend="flash4"), 128, 65536) == full
    assert H200.attention_rate(layer("full", backend="flash"), 128, 65536).both < 0.6 * full.both
    assert H200.attention_rate(layer("full"), 128, 2**24) == H200.attention_rate(layer("full"), 128, 2**18)
    fine, coarse = (H200.attention_rate(layer("moba", block_size=size, topk=12), 128, 2**20) for size in (128, 4096))
    assert coarse.both > 2 * fine.both
    assert H200.attention_rate(layer("moba", block_size=2048, topk=12), 128, 2**20) == coarse
    between = H200.attention_rate(layer("full"), 128, 2**14)
    ends = [H200.attention_rate(layer("full"), 128, 2**13), H200.attention_rate(layer("full"), 128, 2**15)]
    assert between == pytest.approx(AttentionRate(*(sum(pair) / 2 for pair in zip(*ends, strict=True))))


def test_a_window_takes_the_time_of_its_pairs() -> None:
    """Other windows have the rate of the measured one with the nearest number of sinks."""
    for row in results("windows-h200"):
        if row["kind"] == "window":
            sinks = row["options"]["sinks"]
            rates = [
                H200.attention_rate(layer("window", window=window, sinks=near), 64, row["tokens"])
                for window, near in ((2048, sinks), (512, sinks), (512, sinks // 2), (512, sinks + 4))
            ]
            assert rates[0].both == pytest.approx(12e3 * 32 * 64 * row["pairs"] / row["both_ms"]["median"], rel=1e-3)
            assert rates == rates[:1] * 4


def test_a_row_without_options_was_measured_with_the_defaults() -> None:
    """As `moba-train calibrate` writes them of most kinds, here of `window`."""
    measured = next(row for row in H200.attention if row.kind == "window")
    rates = H200.model_copy(update={"attention": (measured.model_copy(update={"options": {}}),)})
    expected = H200.attention_rate(layer("window"), 64, measured.tokens)
    for window in (2048, 512):
        assert rates.attention_rate(layer("window", window=window), 64, measured.tokens) == expected


@pytest.mark.parametrize("index_keys", ["shared", "group"])
def test_a_gate_that_learns_from_every_eighth_query_has_its_own_rate(index_keys: str) -> None:
    """Its divergence is slower than attention, so that the rate for all queries would give other times. A row that
    does not name an option was measured with its default."""
    model = MEASURED_MODEL.model_copy(update={"head_dim": 64})
    times = {}
    for every in (1, 8):
        found = layer("msa", mode="warmup", index_keys=index_keys, kl_every=every)
        rate = H200.attention_rate(found, 64, 32768)
        times[every] = 1e3 * layer_flops(model, found, [32768]) / rate.both
    rows = [row for row in results("distilled-groups-h200") if row["tokens"] == 32768 and row["kind"] == "msa"]
    (row,) = (one for one in rows if {"mode": "warmup", "index_keys": index_keys}.items() <= one["options"].items())
    assert times[8] == pytest.approx(row["both_ms"]["median"], rel=1e-3)
    if index_keys == "shared":
        assert times[1] == pytest.approx(87.01, rel=1e-3)


@pytest.mark.parametrize("kind", ["seer", "msa"])
def test_a_rate_of_one_mode_is_not_taken_for_the_other(kind: str) -> None:
    """However near its other options are."""
    row = next(row for row in H200.attention if row.kind == kind and row.options.get("mode") == "sparse")
    every = row.model_copy(update={"options": {"mode": "warmup", "kl_every": 8}, "forward_ms": 1e-3, "both_ms": 3e-3})
    rates = H200.model_copy(update={"attention": (row, every)})
    sparse, warmup = (layer(kind, mode=mode, kl_every=8) for mode in ("sparse", "warmup"))
    alone = rates.model_copy(update={"attention": (row,)})
    assert rates.attention_rate(sparse, 64, row.tokens) == alone.attention_rate(sparse, 64, row.tokens)
    assert rates.attention_rate(warmup, 64, row.tokens).both > 100 * rates.attention_rate(sparse, 64, row.tokens).both
    assert alone.attention_rate(warmup, 64, row.tokens).both > 0


def test_a_short_sequence_has_no_rate_of_long_ones_alone() -> None:
    """Gates with `kl_every` take at least half of the time of those without, at every length that was measured."""
    model = MEASURED_MODEL.model_copy(update={"head_dim": 64})
    for kind, mode, tokens in itertools.product(("seer", "msa"), ("sparse", "warmup"), (8192, 32768, 131072)):
        times = []
        for every in (1, 8):
            found = layer(kind, mode=mode, kl_every=every)
            times.append(layer_flops(model, found, [tokens]) / H200.attention_rate(found, 64, tokens).both)
        assert 0.5 < times[1] / times[0] < 1.1, (kind, mode, tokens)


def test_a_kind_that_was_never_measured_is_named() -> None:
    with pytest.raises(PlanError, match=r"'infllm' has no measured time on H200.*: full, moba,.*`moba-train calib"):
        H200.attention_rate(layer("infllm"), 128, 8192)


@pytest.mark.parametrize("options", [{"chunk": 1}, {"block_size": "wide"}, {"block_size": 0}])
def test_options_that_the_kind_does_not_have_are_named(options: dict[str, int | str]) -> None:
    """As of a file that another release measured."""
    row = next(row for row in H200.attention if row.kind == "moba")
    rates = H200.model_copy(update={"attention": (row.model_copy(update={"options": options}),)})
    with pytest.raises(PlanError, match=rf"'moba' does not take: {next(iter(options))}: .*`moba-train calibrate"):
        rates.attention_rate(layer("moba"), 128, 8192)


def test_rates_are_found_by_the_name_of_the_gpu() -> None:
    assert shipped_rates(Gpu("NVIDIA H200", 989, 1.0)) == H200
    assert shipped_rates(Gpu("NVIDIA H100 80GB HBM3", 989, 1.0)).gpu == "H100"
    unknown = shipped_rates(Gpu("NVIDIA GeForce GTX 1080", None, 1.0))
    assert unknown.told.endswith("NVIDIA GeForce GTX 1080 are not known: measure them by moba-train calibrate)")
    assert unknown.model_copy(update={"note": H200.note}) == H200


def test_a_file_of_rates_is_read_as_it_was_written_and_another_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "rates.json"
    file.write_text(H200.to_json())
    assert read_rates(file) == H200
    assert H200.device == named_gpu("h200")
    for content, reason in (
        ("{}", "format: Field"),
        ("[", "Invalid JSON"),
        ('{"format": 2}', "format: Input should be 1"),
        (json.dumps(H200.model_dump(mode="json") | {"products": math.inf}), "products: Input should be a finite"),
    ):
        file.write_text(content)
        with pytest.raises(PlanError, match=rf"--rates: \S+ holds no rates: {reason}.*`moba-train calibrate"):
            read_rates(file)
    with pytest.raises(PlanError, match=r"nowhere.json holds no rates: No such file"):
        read_rates(tmp_path / "nowhere.json")
