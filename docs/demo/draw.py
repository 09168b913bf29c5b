"""Draw a recording of `record.py`:  python docs/demo/draw.py RECORDING.json PICTURE.svg

One lane a stream, one tick a chunk of tokens, time from left to right. Where SVG animation is shown the picture plays
in real time, again and again; elsewhere all of it is visible at once. Standard library only.
"""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

WIDTH, LEFT, RIGHT = 960, 104, 166
TOP, LANE = 118, 17
HOLD_S = 4.0
"""How long the finished picture stands before it plays again."""

BACKGROUND, TEXT, DIM, LINE = "#11151c", "#e6e9ef", "#8b95a7", "#2a3140"
TOKEN, LOST, BACK = "#6ea8fe", "#ff6b6b", "#5fd38d"


class Picture:
    """Turns seconds into pixels and collects SVG elements."""

    def __init__(self, recording: dict[str, Any]):
        self.recording = recording
        self.num_streams = len(recording["finish_reasons"])
        self.end_s = max(event[0] for event in recording["events"]) + 0.1
        self.parts: list[str] = []

    def x(self, seconds: float) -> float:
        return round(LEFT + (WIDTH - LEFT - RIGHT) * seconds / self.end_s, 1)

    def y(self, stream: int) -> float:
        return TOP + LANE * stream + LANE / 2

    @property
    def bottom(self) -> int:
        return TOP + LANE * self.num_streams

    @property
    def height(self) -> int:
        return self.bottom + 64

    def text(self, x: float, y: float, words: str, colour: str = TEXT, anchor: str = "start", inner: str = "") -> None:
        self.parts.append(f'<text x="{x}" y="{y}" fill="{colour}" text-anchor="{anchor}">{words}{inner}</text>')

    def appears(self, seconds: float) -> str:
        """An animation that hides its element until `seconds` of each round."""
        share = min(1.0, seconds / (self.end_s + HOLD_S))
        return (
            f'<animate attributeName="opacity" calcMode="discrete" values="0;1" keyTimes="0;{share:.4f}" '
            f'dur="{self.end_s + HOLD_S:.2f}s" repeatCount="indefinite"/>'
        )


def gaps(recording: dict[str, Any]) -> list[float]:
    """Per stream: the longest time between two chunks."""
    times: dict[int, list[float]] = {}
    for moment, stream, _ in recording["events"]:
        times.setdefault(stream, []).append(moment)
    return [max(later - earlier for earlier, later in pairwise(moments)) for _, moments in sorted(times.items())]


def draw(recording: dict[str, Any]) -> str:
    """The picture as SVG text."""
    picture = Picture(recording)
    longest = gaps(recording)
    killed, back = recording["killed_at_s"], recording["back_at_s"]
    worker, count = recording["worker"], picture.num_streams
    picture.text(24, 34, f"{count} clients stream {recording['num_tokens']} tokens each from two workers", TEXT)
    line = f"$ kill -9 {recording['pid']} ({worker}, {killed:.1f} s after the start)"
    picture.text(24, 58, line, LOST, inner=picture.appears(killed))
    line = f"{worker} is back as pid {recording['new_pid']} after {back - killed:.1f} s"
    picture.text(24, 80, line, BACK, inner=picture.appears(back))
    for second in range(int(picture.end_s) + 1):
        x = picture.x(second)
        picture.parts.append(f'<path d="M{x} {TOP - 6}V{picture.bottom + 4}" stroke="{LINE}"/>')
        picture.text(x, picture.bottom + 20, f"{second} s", DIM, "middle")
    for stream in range(count):
        picture.text(LEFT - 12, picture.y(stream) + 4, f"stream {stream + 1}", DIM, "end")
    ticks = [f"M{picture.x(moment)} {picture.y(int(stream)) - 5:g}v10" for moment, stream, _ in recording["events"]]
    picture.parts.append(f'<g clip-path="url(#played)"><path d="{"".join(ticks)}" stroke="{TOKEN}"/></g>')
    for moment, colour, name in ((killed, LOST, "kill -9"), (back, BACK, "back")):
        x = picture.x(moment)
        picture.parts.append(
            f'<path d="M{x} {TOP - 10}V{picture.bottom + 4}" stroke="{colour}" stroke-width="2" '
            f'stroke-dasharray="5 3">{picture.appears(moment)}</path>'
        )
        picture.text(x, TOP - 14, name, colour, "middle", picture.appears(moment))
    last = {int(stream): moment for moment, stream, _ in recording["events"]}
    for stream, reason in enumerate(recording["finish_reasons"]):
        words = f"done, pause {longest[stream]:.2f} s" if reason in ("stop", "length") else str(reason)
        picture.text(WIDTH - RIGHT + 10, picture.y(stream) + 4, words, BACK, inner=picture.appears(last[stream]))
    finished = sum(reason in ("stop", "length") for reason in recording["finish_reasons"])
    same = sum(recording["same_tokens_as_undisturbed"])
    line = (
        f"{finished} of {count} finished, no token lost or doubled; {same} of {count} equal the undisturbed run; "
        f"longest pause {max(longest):.2f} s"
    )
    picture.text(24, picture.bottom + 46, line, TEXT, inner=picture.appears(picture.end_s))
    total = picture.end_s + HOLD_S
    reveal = (
        f'<clipPath id="played"><rect x="0" y="0" width="{WIDTH}" height="{picture.height}">'
        f'<animate attributeName="width" values="{LEFT};{picture.x(picture.end_s)};{picture.x(picture.end_s)}" '
        f'keyTimes="0;{picture.end_s / total:.4f};1" dur="{total:.2f}s" repeatCount="indefinite"/></rect></clipPath>'
    )
    body = "\n".join(picture.parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{picture.height}" '
        f'viewBox="0 0 {WIDTH} {picture.height}" font-family="ui-monospace, DejaVu Sans Mono, Menlo, monospace" '
        f'font-size="12.5">\n<title>Recording: a worker is killed while {count} clients stream</title>\n'
        f'<defs>{reveal}</defs>\n<rect width="{WIDTH}" height="{picture.height}" rx="10" fill="{BACKGROUND}"/>\n'
        f"{body}\n</svg>\n"
    )


def main() -> int:
    if len(sys.argv) != 3:
        print(__doc__, file=sys.stderr)
        return 2
    Path(sys.argv[2]).write_text(draw(json.loads(Path(sys.argv[1]).read_text())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
