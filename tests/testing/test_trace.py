"""The record: lanes, page, dump and estimate say what happened, also when it went wrong."""

from __future__ import annotations

import math
import pickle
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from kpool_testing import INTERCONNECTS, Call, DeadlockError, Interconnect, Trace, replay
from kpool_testing.record.call import canonical_kind, is_user_file, user_site
from kpool_testing.record.interconnect import seconds

GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"


def call(rank: int, seq: int = 0, kind: str = "all_gather_single", **changes: Any) -> Call:
    fields = {
        "rank": rank,
        "kind": kind,
        "group": "world",
        "ranks": (0, 1, 2),
        "seq": seq,
        "shape": (2, 3),
        "dtype": "float32",
        "bytes": 24,
        "site": "/home/me/model/attention.py:12",
    }
    return Call(**{**fields, **changes})


def broken() -> Trace:
    """A gather of all three ranks, then one that rank 1 never joins."""

    def fn(group: Any) -> None:
        for number in range(2):
            if number == 0 or group.rank() != 1:
                getattr(dist, GATHER)(torch.empty(6, 3), torch.zeros(2, 3), group=group)

    with pytest.raises(DeadlockError) as caught:
        replay(fn, 3)
    return caught.value.trace


def whole() -> Trace:
    return Trace([call(rank, seq) for seq in range(2) for rank in range(3)])


class TestLanes:
    def test_one_column_a_rank_and_a_mark_where_one_is_missing(self) -> None:
        lines = broken().lanes().splitlines()
        assert re.fullmatch(r" +rank 0 +rank 1 +rank 2", lines[0])
        assert lines[1].startswith("   0 ") and lines[1].count("all_gather_single f32[2, 3]") == 3
        assert lines[2].startswith("!  1 ") and "(missing)" in lines[2]
        assert re.search(r"testing/test_trace\.py:\d+$", lines[2])

    def test_disagreement_is_marked(self) -> None:
        trace = Trace([call(0), call(1, shape=(1, 3)), call(2)])
        assert trace.lanes().splitlines()[1].startswith("!")
        assert not Trace([call(rank) for rank in range(3)]).lanes().splitlines()[1].startswith("!")

    def test_many_ranks_fold_into_one_line(self) -> None:
        ranks = tuple(range(64))
        calls = [call(rank, ranks=ranks, shape=(3 if rank == 5 else 2, 3)) for rank in ranks if rank != 63]
        line = Trace(calls).lanes()
        assert "ranks 0-4,6-62: all_gather_single f32[2, 3]; ranks 5: all_gather_single f32[3, 3]" in line
        assert "ranks 63: (missing)" in line and line.startswith("!")

    def test_groups_and_outsiders(self) -> None:
        trace = Trace([call(0, group="tp", ranks=(0, 2), detail="op=SUM"), call(2, group="tp", ranks=(0, 2))], size=3)
        line = trace.lanes(40).splitlines()[1]
        assert "op=SUM" in line and " . " in line and line.endswith("[tp]")

    def test_sends_stand_alone(self) -> None:
        trace = Trace([call(0, kind="send", detail="dst=1"), call(1, kind="recv", detail="src=0")])
        assert [line[0] for line in trace.lanes().splitlines()[1:]] == [" ", " "]

    def test_rows_follow_every_ranks_own_order(self) -> None:
        subgroup = [call(rank, group="tp", ranks=(0, 2)) for rank in (0, 2)]
        last = [call(rank, 0, "barrier") for rank in range(3)]
        lines = Trace([last[1], subgroup[0], last[0], subgroup[1], last[2]]).lanes().splitlines()
        assert "[tp]" in lines[1] and "barrier" in lines[2]

    def test_opposite_orders_still_give_every_row(self) -> None:
        calls = [call(0, group=group, ranks=(0, 1)) for group in "ab"] + [
            call(1, group=group, ranks=(0, 1)) for group in "ba"
        ]
        assert len(Trace(calls).lanes().splitlines()) == 3

    def test_nothing_happened(self) -> None:
        assert Trace().lanes() == "no collectives"


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


class TestPage:
    def test_it_is_whole_escaped_and_alone(self, tmp_path: Path) -> None:
        path = broken().write_html(tmp_path / "t.html", title="a <b> & c", note="rank 1 <b> rank 2")
        text = path.read_text(encoding="utf-8")
        page = Page(text)
        assert page.open == [] and "a <b> & c" in page.text and "rank 1 <b> rank 2" in page.text
        assert "<b>" not in text and "<script" not in text
        assert not [name for name, _ in page.attributes if name in ("src", "href")] and "url(" not in text

    def test_every_fact_is_text_not_colour(self) -> None:
        page = Page(broken().html())
        assert "never called" in page.text and "ranks missing" in page.text
        assert page.text.count("all_gather_single f32[2, 3]") == 5
        assert "120 bytes sent" in page.text and "nvlink4" in page.text
        assert "differs" in Page(Trace([call(0), call(1, dtype="int32"), call(2)]).html()).text


class TestFlightRecorder:
    def analyse(self, folder: Path) -> Any:
        trace = pytest.importorskip("torch.distributed.flight_recorder.fr_trace", reason="torch ships no analyzer")
        out = folder.parent / "out.pickle"
        trace.main([str(folder), "-o", str(out)])
        return pickle.loads(out.read_bytes())[1]

    def test_torch_reads_a_good_run(self, tmp_path: Path) -> None:
        files = whole().write_flight_recorder(tmp_path / "dump")
        assert [file.name for file in files] == ["rank_0", "rank_1", "rank_2"]
        database = self.analyse(tmp_path / "dump")
        assert [c.pass_check for c in database.collectives] == [True, True]
        assert database.groups[0].desc == "world" and len(database.ncclcalls) == 6

    def test_torch_finds_the_missing_rank(self, tmp_path: Path) -> None:
        broken().write_flight_recorder(tmp_path / "dump")
        database = self.analyse(tmp_path / "dump")
        first, second = database.collectives
        assert not first.missing_ranks and second.missing_ranks == {1}
        assert second.collective_state == "scheduled"
        assert "test_trace.py" in second.collective_frames[0]["filename"]

    def test_torch_finds_the_wrong_kind_and_subgroups(self, tmp_path: Path) -> None:
        calls = [call(0), call(1, kind="all_reduce"), call(2)]
        calls += [call(rank, group="tp", ranks=(0, 2), kind="reduce_scatter_single") for rank in (0, 2)]
        calls += [call(rank, 0, kind, ranks=(0, 1, 2), group="dp") for kind in KINDS for rank in range(3)]
        Trace(calls).write_flight_recorder(tmp_path / "dump")
        database = self.analyse(tmp_path / "dump")
        by_group = {c.pg_desc.split(":")[1]: c for c in database.collectives}
        assert not by_group["world"].pass_check and by_group["tp"].pass_check
        assert sum(c.pg_desc.endswith("dp") and c.pass_check for c in database.collectives) == len(KINDS)

    def test_an_empty_run_has_empty_dumps(self, tmp_path: Path) -> None:
        files = Trace(size=2).write_flight_recorder(tmp_path)
        assert [pickle.loads(file.read_bytes())["entries"] for file in files] == [[], []]


KINDS = ("all_gather", "all_reduce", "all_to_all_single", "broadcast", "gather", "scatter", "reduce", "barrier")


class TestBytesAndTime:
    def test_totals(self) -> None:
        trace = whole()
        assert trace.total_bytes() == 144 and trace.total_bytes(rank=1) == 48
        assert trace.total_bytes(kind="all_gather_into_tensor") == 144 and trace.total_bytes(kind="all_reduce") == 0
        assert len(trace) == 6 and trace.size == 3 and "3 ranks" in repr(trace)

    def test_the_formulas_by_hand(self) -> None:
        link = Interconnect("test", 10e-6, 1e9)
        expected = {
            "all_gather_single": 7 * (10e-6 + 8e-3),
            "all_reduce": 14 * (10e-6 + 1e-3),
            "reduce_scatter_single": 7 * (10e-6 + 1e-3),
            "all_to_all_single": 7 * (10e-6 + 1e-3),
            "broadcast": 3 * (10e-6 + 8e-3),
            "reduce": 3 * (10e-6 + 8e-3),
            "barrier": 3 * 10e-6,
            "send": 10e-6 + 8e-3,
        }
        for kind, value in expected.items():
            assert math.isclose(seconds(kind, 8_000_000, 8, link), value), kind
            assert seconds(kind, 8_000_000, 1, link) == 0

    def test_the_slowest_rank_counts(self) -> None:
        trace = Trace([call(0, bytes=10**9, ranks=(0, 1)), call(1, bytes=0, ranks=(0, 1))])
        assert math.isclose(trace.estimate(Interconnect("x", 0.0, 1e9)), 1.0)
        assert trace.estimate("nvlink4") < trace.estimate("ethernet-10g")
        assert all(name == link.name for name, link in INTERCONNECTS.items())

    def test_an_unknown_interconnect_is_refused(self) -> None:
        with pytest.raises(ValueError, match=r"unknown interconnect 'carrier pigeon'.*nvlink4"):
            Trace().estimate("carrier pigeon")


def test_names_are_canonical() -> None:
    assert canonical_kind("all_gather_into_tensor") == canonical_kind("_allgather_base") == "all_gather_single"
    assert canonical_kind("reduce_scatter_tensor") == "reduce_scatter_single"
    assert canonical_kind("barrier") == "barrier"


def test_sites_are_the_users() -> None:
    assert "test_trace.py:" in user_site()
    assert is_user_file("/home/me/torch/train.py") and is_user_file("C:\\me\\train.py")
    assert not is_user_file(torch.__file__) and not is_user_file("<frozen importlib._bootstrap>")


def test_calls_read_as_a_sentence() -> None:
    assert str(call(0, 4, detail="op=SUM")) == (
        "all_gather_single#4 float32[2, 3] op=SUM on world at /home/me/model/attention.py:12"
    )
