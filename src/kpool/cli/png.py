"""Bars in a PNG from numpy alone, for machines that have a GPU and no plotting package."""

from __future__ import annotations

import math
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np

WHITE, BLACK, GREY = (255, 255, 255), (30, 30, 30), (205, 205, 205)
COLOURS = {"whole": (0, 114, 178), "contiguous": (230, 159, 0), "block_cyclic": (0, 158, 115)}  # told apart by all
_SCALE, _HEIGHT, _BAR, _GAP, _MARGIN, _TOP = 2, 300, 104, 14, 96, 56
_FONT = (  # five rows of three pixels, each row an octal digit
    "A25755 B65656 C34443 D65556 E74647 F74644 G34553 H55755 I72227 J11152 K55655 L44447 M57755 N65555 O25552 P65644 "
    "Q25573 R65655 S34216 T72222 U55557 V55552 W55775 X55255 Y55222 Z71247 075557 126227 261247 361216 455711 574616 "
    "634757 771222 875757 975716 .00002 %51245 -00700 /11244 ,00024 :02020 (12221 )42224 _00007"
)
_GLYPHS = {glyph[0]: glyph[1:] for glyph in _FONT.split(" ")}


class Canvas:
    """RGB pixels, white at first; x to the right, y downwards."""

    def __init__(self, width: int, height: int) -> None:
        self.pixels = np.full((height, width, 3), 255, np.uint8)

    def box(self, x: int, y: int, width: int, height: int, colour: tuple[int, int, int]) -> None:
        """Fill a rectangle."""
        self.pixels[y : y + height, x : x + width] = colour

    def text(self, x: int, y: int, words: str, colour: tuple[int, int, int] = BLACK) -> None:
        """Write at a top left corner, in capitals."""
        for letter in words.upper():
            for down, row in enumerate(_GLYPHS.get(letter, "00000")):
                for along in range(3):
                    if int(row) >> (2 - along) & 1:
                        self.box(x + along * _SCALE, y + down * _SCALE, _SCALE, _SCALE, colour)
            x += 4 * _SCALE

    def save(self, path: Path) -> None:
        """Write the file."""
        height, width, _ = self.pixels.shape
        rows = b"".join(b"\0" + line.tobytes() for line in self.pixels)
        parts = {b"IHDR": struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0), b"IDAT": zlib.compress(rows)}
        out = b"\x89PNG\r\n\x1a\n"
        for kind, data in {**parts, b"IEND": b""}.items():
            out += struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        path.write_bytes(out)


def seconds(value: float) -> str:
    """Seconds with a unit, three digits."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if value * factor >= 1 or unit == "us":
            return f"{value * factor:.3g} {unit}"
    raise AssertionError("unreachable")


def write_bars(path: Path, result: dict[str, Any]) -> None:
    """Total time of every record of a GPU benchmark as a bar on a logarithmic axis, with its select share."""
    records = result["records"]
    low = math.floor(math.log10(min(record["total_s"] for record in records)))
    high = max(low + 1, math.ceil(math.log10(max(record["total_s"] for record in records))))
    foot = _TOP + _HEIGHT
    canvas = Canvas(max(640, _MARGIN + len(records) * (_BAR + _GAP) + _GAP), foot + 56)
    canvas.text(_GAP, 12, f"selection, slowest rank, log scale: {result['device']}, {result['date']}")
    for decade in range(low, high + 1):
        y = foot - (decade - low) * _HEIGHT // (high - low)
        canvas.box(_MARGIN - 6, y, canvas.pixels.shape[1] - _MARGIN, 1, GREY)
        canvas.text(_GAP, y - 5, seconds(10.0**decade))
    for place, record in enumerate(records):
        x = _MARGIN + place * (_BAR + _GAP)
        tall = int((math.log10(record["total_s"]) - low) / (high - low) * _HEIGHT)
        canvas.box(x, foot - tall, _BAR, tall, COLOURS[record["plan"]])
        canvas.text(x, foot - tall - 14, seconds(record["total_s"]))
        canvas.text(x, foot + 8, f"{record['tokens']:,}")
        canvas.text(x, foot + 22, record["plan"])
        canvas.text(x, foot + 36, f"select {record['select_share']:.0%}")
    canvas.box(_MARGIN - 6, foot, canvas.pixels.shape[1] - _MARGIN, 2, BLACK)
    canvas.save(path)
