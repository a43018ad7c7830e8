"""The index of a run's metrics: growth, repeated steps, damaged lines, and few points of a long curve."""

import json

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tensorforge.dashboard import metrics_index
from tensorforge.dashboard.metrics_index import MetricsIndex, downsample, throughput


def line(step, loss=1.0, **facts):
    return (
        json.dumps(
            {"step": step, "time": float(step), "samples": 8, "metrics": {"loss": loss}, **facts}
        )
        + "\n"
    )


def test_lines_that_are_added_are_read_and_an_incomplete_one_waits(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(0) + line(1))
    index = MetricsIndex(path)
    assert index.columns()["step"].tolist() == [0, 1]
    with path.open("a") as file:
        file.write(line(2, 0.5)[:-5])
    assert index.columns()["step"].tolist() == [0, 1]
    with path.open("a") as file:
        file.write(line(2, 0.5)[-5:])
    assert index.columns()["loss"].tolist() == [1.0, 1.0, 0.5]


def test_steps_that_a_restore_repeats_count_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(line(step, 9.0) for step in range(5)) + line(2, 1.0) + line(3, 2.0))
    columns = MetricsIndex(path).columns()
    assert columns["step"].tolist() == [0, 1, 2, 3]
    assert columns["loss"].tolist() == [9.0, 9.0, 1.0, 2.0]


def test_a_damaged_line_and_a_metric_that_is_no_number_are_survived(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        line(0) + "{broken\n" + '{"step": 1, "metrics": {"loss": "<script>"}}\n' + line(2)
    )
    columns = MetricsIndex(path).columns()
    assert columns["step"].tolist() == [0, 1, 2]
    assert np.isnan(columns["loss"][1])


def test_a_metric_that_begins_late_has_no_values_before(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(line(0) + line(1, metrics={"accuracy": 0.5}))
    columns = MetricsIndex(path).columns()
    assert np.isnan(columns["accuracy"][0])
    assert columns["accuracy"][1] == 0.5
    assert np.isnan(columns["loss"][1])


def test_a_file_that_was_replaced_is_read_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(map(line, range(9))))
    index = MetricsIndex(path)
    index.columns()
    other = tmp_path / "other"
    other.write_text(line(0) + line(1))
    other.replace(path)
    assert index.columns()["step"].tolist() == [0, 1]


def test_the_first_answer_about_a_large_file_is_a_sample_up_to_the_newest_step(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(metrics_index, "QUICK_BYTES", 1000)
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(map(line, range(5000))))
    index = MetricsIndex(path)
    first = index.columns(quick=True)["step"]
    assert 10 < len(first) < 1000
    assert first[0] == 0
    assert first[-1] == 4999
    assert (np.diff(first) > 0).all()
    index.close()
    assert len(index.columns(quick=True)["step"]) == 5000


def test_the_newest_line_is_read_without_the_rest(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert MetricsIndex(path).last() is None
    path.write_text("".join(map(line, range(1000))) + '{"step": 1000')
    assert MetricsIndex(path).last().step == 999


def test_throughput_is_samples_by_seconds():
    columns = {"time": np.array([0.0, 2.0, 2.0]), "samples": np.array([8.0, 8.0, 8.0])}
    found = throughput(columns)
    assert found[1] == 4
    assert np.isnan(found[[0, 2]]).all()


@given(st.lists(st.floats(-1e6, 1e6) | st.just(float("nan")), max_size=400), st.integers(1, 20))
def test_few_points_keep_the_ends_and_the_extremes(values, buckets):
    ys = np.array(values, dtype=float)
    points = downsample(np.arange(len(ys), dtype=float), ys, buckets)
    finite = [(float(x), y) for x, y in enumerate(values) if y == y]
    assert len(points) <= 2 * buckets + 2
    assert set(points) <= set(finite)
    assert [x for x, _ in points] == sorted(x for x, _ in points)
    if finite:
        assert points[0] == finite[0]
        assert points[-1] == finite[-1]
        assert {min(y for _, y in finite), max(y for _, y in finite)} <= {y for _, y in points}
