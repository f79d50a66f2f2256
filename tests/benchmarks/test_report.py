"""The arithmetic and the forms of the benchmarks' report."""

import argparse
import json
import math

import pytest

from benchmarks.report import Comparison, Metric, add_arguments, alternate, markdown, print_json, show

RATE = Metric(name="rate", label="calls/s")
WAIT = Metric(name="wait", label="wait, ms", higher_is_better=False)


def compared() -> Comparison:
    return Comparison(
        benchmark="calls",
        workload="small",
        rounds={
            "torch": [{"rate": 10.0, "wait": 1.0}, {"rate": 100.0, "wait": 2.0}, {"rate": 20.0, "wait": 3.0}],
            "dpflow": [
                {"rate": 20.0, "wait": 1.0},
                {"rate": 110.0, "wait": 1.0},
                {"rate": 60.0, "wait": 9.0},
            ],
        },
        parameters={"bytes": 100},
    )


def test_sides_take_turns_and_the_first_changes() -> None:
    order: list[str] = []

    def side(name: str) -> "dict[str, float]":
        order.append(name)
        return {"rate": float(len(order))}

    comparison = alternate(
        "b", "w", {name: lambda name=name: side(name) for name in "xy"}, rounds=3, progress=lambda line: None
    )
    assert order == ["x", "y", "y", "x", "x", "y"]
    assert [figures["rate"] for figures in comparison.rounds["x"]] == [1.0, 4.0, 5.0]
    assert comparison.baseline == "x"


def test_no_rounds_are_refused() -> None:
    with pytest.raises(ValueError, match="rounds=0"):
        alternate("b", "w", {}, rounds=0)


def test_median_and_ratio_of_neighbours_in_time() -> None:
    comparison = compared()
    assert comparison.median("torch", "rate") == 20.0
    assert comparison.ratio("dpflow", "rate") == 2.0  # of 2.0, 1.1 and 3.0; not 60 / 20
    assert comparison.ratio_range("dpflow", "rate") == (1.1, 3.0)


def test_ratio_to_nothing_is_no_number() -> None:
    comparison = Comparison(benchmark="b", workload="w", rounds={"x": [{"rate": 0.0}], "y": [{"rate": 1.0}]})
    assert math.isnan(comparison.ratio("y", "rate"))


def test_json_line_holds_raw_figures_machine_and_versions(capsys: pytest.CaptureFixture[str]) -> None:
    print_json(compared())
    (line,) = capsys.readouterr().out.splitlines()
    record = json.loads(line)
    assert record["rounds"]["torch"][1] == {"rate": 100.0, "wait": 2.0}
    assert record["ratio"] == {"dpflow": {"rate": 2.0, "wait": 1.0}}
    assert record["median"]["dpflow"]["rate"] == 60.0
    assert record["parameters"] == {"bytes": 100}
    assert record["machine"]["cores"] >= 1
    assert "torch" in record["machine"]["packages"]


def test_table_has_a_row_for_each_side_and_says_which_way_is_better(
    capsys: pytest.CaptureFixture[str],
) -> None:
    show([compared()], [RATE, WAIT])
    printed = capsys.readouterr().out
    assert "2.00 (1.10-3.00), higher is better" in printed
    show([compared()], [WAIT])
    assert "1.00 (0.50-3.00), lower is better" in capsys.readouterr().out


def test_markdown_leaves_blank_what_a_workload_does_not_report() -> None:
    absent = Metric(name="absent", label="absent")
    lines = markdown([compared()], [absent, RATE]).splitlines()
    assert lines[0] == "| workload | side | absent | calls/s | ratio (range) |"
    assert lines[2] == "| small | torch |  | 20 |  |"
    assert lines[3].startswith("| small | dpflow |  | 60 | 2.00")


@pytest.mark.parametrize("wrong", [["--rounds=0"], ["--json", "--markdown"]])
def test_wrong_arguments_are_refused(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(wrong)
    assert capsys.readouterr().err
