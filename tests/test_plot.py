"""The pictures: what they count, what they say, what they refuse."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kpool.cli import estimate, main, plan, plot
from kpool.cli.estimate import CARDS, Geometry
from kpool.cli.exits import CommandError
from kpool_testing.record.interconnect import INTERCONNECTS, Interconnect

DOCS = Path(__file__).resolve().parents[1] / "docs"
GLM = Geometry(tokens=524_288, batch=1, heads=32, dim=128, pool=4, topk=2048)
CAUSAL = sum((i + 1) // 4 for i in range(524_288))


def arguments(**changes: Any) -> argparse.Namespace:
    options = {"tokens": 1024, "ranks": 4, "batch": 1, "layout": "causal", "documents": None, "order": "score"}
    options |= {"heads": 32, "dim": 128, "pool": 4, "topk": 64, "device": "cpu", "seed": 0, "card": "h200"}
    options |= {"score_tflops": None, "interconnect": "nvlink4"}
    return argparse.Namespace(**{**options, **changes})


class TestEstimate:
    def test_the_parts_by_hand(self) -> None:
        """10 pools of 2 heads and 3 dims: 120 operations; 40 bytes of scores; 8 tokens."""
        card = estimate.Card("slow", (60.0, 120.0), 20.0, 10.0)
        call = Geometry(tokens=8, batch=1, heads=2, dim=3, pool=4, topk=8)
        fast, slow = (estimate.step(10, call, card, fast=fast) for fast in (True, False))
        assert (fast.score, slow.score) == (1.0, 2.0)
        assert (fast.select, slow.select) == (40 * 2 / 20, 40 * 5 / 10)
        same = (8 * 3 * (2 + 2 + 2 / 4) + 8 * 4 * (11 + 2)) / 10
        assert fast.same == slow.same == pytest.approx(same)
        assert (fast.gather, fast.reorder) == (0, 0)
        assert fast.total == pytest.approx(1 + 4 + same)

    def test_sharding_adds_the_gather_and_the_copy(self) -> None:
        card, link = CARDS["h200"], Interconnect("wire", 1.0, 100.0)
        for kind, copied in (("contiguous", 0), ("block_cyclic", 2 * 4 * 50)):
            found = estimate.sharded_step(10, 50, kind, 4, GLM, card, link, fast=True)
            assert found.gather == 3 * (1 + 0.5)
            assert found.reorder == copied / card.memory
            assert found.score == estimate.step(10, GLM, card, fast=True).score
        alone = estimate.sharded_step(10, 50, "block_cyclic", 1, GLM, card, link, fast=True)
        assert alone == estimate.step(10, GLM, card, fast=True)

    def test_half_a_million_tokens_on_an_h200(self) -> None:
        """2.8e14 operations at 480 to 570 TF/s: 0.49 to 0.59 s."""
        fast, slow = (estimate.step(CAUSAL, GLM, CARDS["h200"], fast=fast) for fast in (True, False))
        assert fast.score == pytest.approx(0.494, abs=0.001) and slow.score == pytest.approx(0.586, abs=0.001)
        assert 0.54 < fast.total < slow.total < 0.75

    @pytest.mark.parametrize("edge", [1, 31, 32, 33, 5000, estimate.LONGEST])
    def test_break_even_is_the_first_length_that_pays(self, edge: int) -> None:
        found = estimate.break_even(lambda tokens: tokens >= edge)
        assert found is not None and edge <= found < edge + 32

    def test_never(self) -> None:
        assert estimate.break_even(lambda _: False) is None

    @pytest.mark.parametrize(
        ("low", "high", "text"),
        [(0.071, 0.096, "71-96 ms"), (1.234, 1.236, "1.2 s"), (0, 0, "0 µs"), (2e-6, 12e-6, "2.0-12 µs")],
    )
    def test_span(self, low: float, high: float, text: str) -> None:
        assert estimate.span(low, high) == text

    def test_faster_links_pay_earlier_and_one_rank_never(self) -> None:
        ends = [plan.break_even("block_cyclic", arguments(interconnect=link)) for link in ("nvlink4", "pcie5-x16")]
        assert None not in ends[0] + ends[1]
        assert ends[0][0] < ends[1][0]  # type: ignore[operator]
        assert plan.break_even("block_cyclic", arguments(ranks=1)) == (None, None)

    def test_a_measured_rate_replaces_the_range(self) -> None:
        card = plan.card_of(arguments(score_tflops=100.0))
        assert card.score == (1e14, 1e14) and "100 TF/s" in card.name

    def test_documents_keep_their_shares(self) -> None:
        longer = plan.at_length(arguments(layout="packed", documents="256,0,768"), 4096)
        assert (longer.tokens, longer.documents) == (4096, "1024,0,3072")


class TestPlanPicture:
    def test_owners_are_the_plans(self) -> None:
        """As many pixels as rows: every row is its own, and only what it sees is coloured."""
        from kpool.cli.plot_plan import owners

        args = arguments(tokens=300, ranks=3)
        windows = plan.layout_windows(args)
        for kind in plan.PLANS:
            image, drawn = owners(kind, windows, args)
            shards = plan.ShardPlan.of(kind, 300, 3)
            assert drawn == 0
            for rank in range(3):
                for row in shards.rows(rank).tolist():
                    assert set(image[row, : row + 1]) == {rank if row >= 3 else -2}
                    assert set(image[row, row + 1 :]) <= {-1}

    def test_many_blocks_are_drawn_as_fewer(self) -> None:
        from kpool.cli.plot_plan import owners

        args = arguments(tokens=65_536, ranks=8)
        image, drawn = owners("block_cyclic", plan.layout_windows(args), args)
        assert drawn == 48 and image.shape == (480, 480)
        assert np.count_nonzero(np.diff(image[10:, 0])) == 47

    def test_rows_without_a_choice_are_grey(self) -> None:
        from kpool.cli.plot_plan import owners

        args = arguments(tokens=400, order="position", topk=64)
        image, _ = owners("contiguous", plan.layout_windows(args), args)
        assert set(image[66, :60]) == {-2} and set(image[68, :60]) == {0}

    @pytest.mark.slow
    @pytest.mark.parametrize("more", [[], ["--layout", "packed", "--ranks", "20"], ["--ranks", "1", "--tokens", "3"]])
    def test_it_draws(self, more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        target = tmp_path / "plan.svg"
        base = ["plan", "--tokens", "2048", "--topk", "64", "--plot", str(target), "--json"]
        assert main([*base, *more]) == 0
        assert json.loads(capsys.readouterr().out)["plans"]
        drawn = target.read_bytes()
        assert drawn.startswith(b"<?xml") and len(drawn) > 20_000

    @pytest.mark.slow
    def test_what_it_says(self) -> None:
        from kpool.cli.plot_plan import picture

        args = arguments(tokens=4096, ranks=2)
        windows = plan.layout_windows(args)
        shares = {kind: plan.plan_shares(kind, windows, args) for kind in plan.PLANS}
        pays = {kind: plan.break_even(kind, args) for kind in plan.PLANS}
        drawn = picture(args, windows, shares, plan.step_times(args, shares), pays)
        titles = [axes.get_title() for axes in drawn.axes]
        assert titles[0] == "contiguous: busiest rank / mean 1.50"
        assert any("estimate, not measured: H200, nvlink4" in title for title in titles)
        units = {axes.get_xlabel() for axes in drawn.axes} | {axes.get_ylabel() for axes in drawn.axes}
        assert {"query rows", "scored pools (% of all)", "time per call (ms)", "tokens"} <= units
        bars = {tick.get_text().replace("\n", " ") for tick in drawn.axes[3].get_yticklabels()}
        assert "pool ids, block_cyclic" in bars


class TestTable:
    def test_json(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["plan", "--json", "--interconnect", "pcie5-x16", "--card", "b200"]) == 0
        found = json.loads(capsys.readouterr().out)["estimate"]
        assert (found["card"], found["interconnect"]) == ("B200", "pcie5-x16")
        whole, cyclic = found["seconds"]["unsharded"]["fast"], found["seconds"]["block_cyclic"]["fast"]
        assert cyclic["score"] == pytest.approx(whole["score"] / 8, rel=0.01)
        assert cyclic["gather"] == pytest.approx(7 * (6e-6 + 128 * 2**20 / 63e9))
        for each in (whole, cyclic):
            assert each["total"] == pytest.approx(sum(each[part] for part in estimate.PARTS))

    def test_the_table_fits_a_terminal_and_calls_itself_an_estimate(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["plan"]) == 0
        out = capsys.readouterr().out
        assert "estimate, not measured" in out and "pays from, tokens" in out and "…" not in out

    @pytest.mark.slow
    def test_the_manual_quotes_the_model(self) -> None:
        """docs/sharding.md has a table of break-even lengths; it is what the model says."""
        rows = re.findall(r"^\| `([\w-]+)` \| ([\d,-]+) \| ([\d,-]+) \|$", (DOCS / "sharding.md").read_text(), re.M)
        assert len(rows) >= 4
        for link, contiguous, cyclic in rows:
            assert link in INTERCONNECTS
            args = arguments(interconnect=link, ranks=8, topk=2048)
            assert plan.pays_text(plan.break_even("contiguous", args)) == contiguous
            assert plan.pays_text(plan.break_even("block_cyclic", args)) == cyclic


class TestBenchPicture:
    def report(self, **memory: int) -> dict[str, Any]:
        lengths = [
            {"tokens": n, "seconds": {"kpool": n / 1e4, "plain": n / 1e3, "gemm": n / 2e4},
             "memory": {name: {"bytes": size} for name, size in memory.items()}}
            for n in (1024, 2048)
        ]  # fmt: skip
        machine = {"threads": 2, "torch": "2", "quiet": False}
        return {"layout": "causal", "order": "score", "machine": machine, "lengths": lengths}

    def test_lines_and_axes(self) -> None:
        from kpool.cli.plot_bench import picture

        drawn = picture(self.report(kpool=2**20, plain=2**24))
        time, memory = drawn.axes
        assert [line.get_label() for line in time.lines][-1] == "limit: the matrix products alone"
        assert [len(time.lines), len(memory.lines)] == [3, 2]
        for axes, unit in ((time, "(s)"), (memory, "(MiB)")):
            assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
            assert unit in axes.get_ylabel() and axes.get_xlabel() == "tokens"
        assert list(memory.lines[1].get_ydata()) == [1.0, 1.0]
        assert "NOT a quiet machine" in drawn.get_suptitle()

    @pytest.mark.slow
    def test_what_was_not_measured_is_said(self, tmp_path: Path) -> None:
        from kpool.cli.plot_bench import picture

        drawn = picture(self.report())
        assert [text.get_text() for text in drawn.axes[1].texts] == ["not measured"]
        plot.save(drawn, tmp_path / "bench.png")
        assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")

    @pytest.mark.slow
    def test_the_same_picture_is_the_same_bytes(self, tmp_path: Path) -> None:
        from kpool.cli.plot_bench import picture

        files = [tmp_path / name for name in ("a.svg", "b.svg")]
        for file in files:
            plot.save(picture(self.report(kpool=2**20)), file)
        assert files[0].read_bytes() == files[1].read_bytes()


class TestRefusals:
    @pytest.mark.parametrize("command", ["plan", "bench"])
    def test_without_matplotlib(
        self, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setattr(plot.importlib.util, "find_spec", lambda name: None)
        assert main([command, "--plot", str(tmp_path / "x.png")]) == 69
        assert capsys.readouterr().err == "kpool: error: --plot needs matplotlib: python -m pip install 'kpool[plot]'\n"

    @pytest.mark.parametrize("command", ["plan", "bench"])
    @pytest.mark.parametrize(("name", "reason"), [("x.pdf", "ending in .png or .svg"), ("no/x.png", "existing folder")])
    def test_a_file_that_cannot_be(
        self, command: str, name: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main([command, "--plot", str(tmp_path / name)]) == 64
        assert reason in capsys.readouterr().err

    def test_a_file_that_is_a_folder(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "x.png").mkdir()
        assert main(["plan", "--plot", str(tmp_path / "x.png")]) == 64
        assert "expected a file" in capsys.readouterr().err

    def test_a_file_that_cannot_be_written(self, tmp_path: Path) -> None:
        with pytest.raises(CommandError, match="cannot write"):
            plot.save(plot.figure(1, 1), tmp_path / "no" / "x.png")

    @pytest.mark.parametrize("rate", ["0", "-1", "nan"])
    def test_a_rate_that_cannot_be(self, rate: str) -> None:
        assert main(["plan", "--score-tflops", rate]) == 64


def test_colours_are_told_apart() -> None:
    """Okabe and Ito's set; next-door ranks also differ in lightness."""
    assert len(set(plot.RANKS)) == 8

    def lightness(colour: str) -> float:
        red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
        return 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2

    steps = [abs(lightness(a) - lightness(b)) for a, b in zip(plot.RANKS, plot.RANKS[1:], strict=False)]
    assert min(steps) > 0.05
