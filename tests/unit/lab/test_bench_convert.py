"""`coli bench convert` on a model so small that it says so."""

from pathlib import Path

from colibri.lab.bench_convert import SCHEMA, bench_convert
from colibri.lab.stream_bench import StreamBench
from colibri.settings import Settings


def test_a_conversion_beside_the_rates_of_the_drive(tmp_path: Path) -> None:
    bench = StreamBench(pairs=1, sample_bytes=1 << 20, hub_shape="tiny")
    settings = Settings.resolve({}, cache_dir=str(tmp_path))
    report = bench_convert(bench, settings, lambda stage, done, total: None).as_dict()
    assert report["schema"] == SCHEMA
    assert all(rate > 0 for rate in report["ceilings"].values())
    share, peak = report["results"]
    assert (share["at_least"], peak["at_most"]) == (0.6, 1_000_000_000)
    details = share["details"]
    limit = max(
        details["source_bytes"] / share["ceilings"]["disk_read_bytes_per_s"],
        details["total_bytes"] / share["ceilings"]["disk_write_bytes_per_s"],
    )
    assert share["value"] * details["elapsed_s"][0] > 0.999 * limit > 0
    assert peak["value"] > 10_000_000
    assert any("are needed" in reason for reason in report["not_a_measurement"])
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["tiny-bf16"]
