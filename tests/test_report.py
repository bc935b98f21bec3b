"""`kpool verify --report`: one page that stands alone and says what the verdict says."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

from kpool import sharding
from kpool.cli import heatmap, main, report
from kpool_testing import MismatchError, Trace

SMALL = ["verify", "--tokens", "72", "--heads", "4", "--dim", "16", "--topk", "16", "--ranks", "3"]


class Page(HTMLParser):
    """The text, the tags and the attributes of a page; fails where a tag is not closed in order."""

    VOID = ("meta", "br", "rect", "path")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def make(tmp_path: Path, *more: str) -> tuple[int, Page]:
    target = tmp_path / "report.html"
    code = main([*SMALL, *more, "--report", str(target), "--json"])
    return code, Page(target.read_text(encoding="utf-8"))


@pytest.mark.parametrize("more", [["--layout", "packed", "--batch", "2"], ["--layout", "mask"], ["--backend", "fake"]])
def test_everything_is_there(more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, page = make(tmp_path, *more)
    assert code == 0
    for words in ("identical (exit code 0)", "all 3 bit-identical", "float64 reference: ", "rank 2", "S=72 T=72"):
        assert words in page.text
    for heading in ("Ranks", "What was selected", "Calls", "Bytes sent", "The call", "Environment"):
        assert heading in page.text
    assert re.search(r"all_gather_(single|into_tensor) i32", page.text)  # torch 2.13 renamed it
    assert torch.__version__.partition("+")[0] in page.text and "query rows" in page.text
    capsys.readouterr()


def test_it_loads_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, page = make(tmp_path)
    assert {"script", "link", "img", "iframe", "object"}.isdisjoint(tag for tag, _ in page.tags)
    for _, attributes in page.tags:
        assert {"src", "href", "onload", "onclick"}.isdisjoint(attributes)
        assert "url(" not in (attributes.get("style") or "")
    policies = [a["content"] for tag, a in page.tags if tag == "meta" and "http-equiv" in a]
    assert policies == ["default-src 'none'; style-src 'unsafe-inline'"]
    assert not re.search(r"@import|url\(|https?://", (tmp_path / "report.html").read_text(encoding="utf-8"))
    capsys.readouterr()


def test_a_difference_is_named_and_marked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gather = sharding.all_gather

    def wrong_on_rank_1(local: Any, group: Any, size: int) -> Any:
        out = gather(local, group, size)
        if group.rank() == 1:
            out[2 * 2 + 1, 5, 0] += 1  # what rank 2 sent for batch entry 1
        return out

    monkeypatch.setattr(sharding, "all_gather", wrong_on_rank_1)
    code, page = make(tmp_path, "--batch", "2")
    assert code == 1
    assert "different (exit code 1)" in page.text
    assert "1 rows differ, first: batch 1 row 53" in page.text
    assert "Batch entry 1 of 2." in page.text and "row 53: rank 1" in page.text
    capsys.readouterr()


def test_ranks_that_do_not_finish_are_reported_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        error = MismatchError("rank 1 <came> with another shape")
        error.trace = Trace([], size=3)
        raise error

    from kpool.cli import verify

    monkeypatch.setattr(verify, "launch", refuse)
    target = tmp_path / "report.html"
    assert main([*SMALL, "--report", str(target)]) == 1
    page = Page(target.read_text(encoding="utf-8"))
    assert "the ranks did not finish" in page.text and "rank 1 <came> with another shape" in page.text
    said = capsys.readouterr().err
    assert "the ranks did not finish" in said and f"wrote {target}" in said


@pytest.mark.parametrize(("name", "reason"), [("no/x.html", "existing folder"), (".", "expected a file")])
def test_refusals(name: str, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--report", str(tmp_path / name)]) == 64
    captured = capsys.readouterr()
    assert reason in captured.err and captured.out == ""


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(report.CommandError, match="cannot write"):
        report.write(tmp_path, "text")


class TestLevels:
    def test_by_hand(self) -> None:
        """Three rows of four tokens; row 2 sees three and selects one of them."""
        tokens = torch.tensor([[0, -1], [0, 1], [1, -1]], dtype=torch.int32)
        start, end = torch.zeros(3, dtype=torch.int32), torch.tensor([1, 2, 3], dtype=torch.int32)
        assert heatmap.levels(tokens, start, end, 4).tolist() == [[5, -1, -1, -1], [5, 5, -1, -1], [0, 5, 0, -1]]

    def test_coarse_cells_count_what_their_rows_see(self) -> None:
        """960 rows and tokens, ten to a cell; every row selects the first token of each cell that it sees whole."""
        rows = torch.arange(960)
        tokens = torch.where(rows[None] * 10 + 10 <= rows[:, None] + 1, rows[None] * 10, -1)[:, :96].to(torch.int32)
        found = heatmap.levels(tokens, torch.zeros(960, dtype=torch.int32), (rows + 1).to(torch.int32), 960)
        assert found.shape == (96, 96)
        assert torch.equal(found >= 0, torch.ones(96, 96, dtype=torch.bool).tril())
        assert set(found[50, :50].tolist()) == {1}  # one of ten: up to 20 %

    @pytest.mark.parametrize("level, share", [(0, 0), (1, 1), (1, 2), (2, 3), (4, 8), (5, 9), (5, 10)])
    def test_edges(self, level: int, share: int) -> None:
        tokens = torch.full((960, 1), -1, dtype=torch.int32)
        tokens[:share] = 0
        ends = torch.ones(960, dtype=torch.int32)
        assert heatmap.levels(tokens, torch.zeros_like(ends), ends, 1)[0, 0] == level


def test_more_ranks_than_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ranks without rows are listed; colours repeat, and none vanishes on a dark page."""
    code, page = make(tmp_path, "--tokens", "1", "--ranks", "9")
    assert code == 0 and "rank 8" in page.text
    assert heatmap.rank_colour(7) == "#888888" and heatmap.rank_colour(8) == heatmap.rank_colour(0)
    capsys.readouterr()
