"""Pictures of coloured shapes: one to five of the same kind and colour, on a light background.

    python -m examples.shapes.pictures FOLDER [--count 8] [--seed 1]

writes some of them as PNG files that are named after what they show. A seed always gives the same pictures.
"""

from __future__ import annotations

import argparse
import colorsys
import io
import math
import random
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw

# Hue in degrees, with its tolerance; saturation and value, each with its range. Far enough apart for people, too.
COLOURS = {
    "red": ((0, 7), (0.8, 1.0), (0.75, 1.0)),
    "orange": ((29, 4), (0.9, 1.0), (0.93, 1.0)),
    "yellow": ((53, 4), (0.85, 1.0), (0.9, 1.0)),
    "green": ((120, 20), (0.65, 1.0), (0.45, 0.8)),
    "blue": ((222, 14), (0.75, 1.0), (0.65, 1.0)),
    "purple": ((280, 9), (0.65, 1.0), (0.45, 0.75)),
    "pink": ((332, 8), (0.35, 0.55), (0.95, 1.0)),
    "black": ((0, 180), (0.0, 0.3), (0.0, 0.15)),
}
SHAPES = ("circle", "ring", "triangle", "star", "cross", "bar")
NUMBERS = ("one", "two", "three", "four", "five")
SIZES = ((320, 240), (240, 320), (256, 256), (320, 180), (180, 320), (105, 105))
"""Width and height of pictures before they are scaled by a number from SCALES."""
SCALES = (0.8, 1.0)
_SMOOTH = 2

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Scene:
    """What a picture shows, and how large it is. `circles` has the centre and the radius of each shape in pixels."""

    colour: str
    shape: str
    width: int
    height: int
    circles: tuple[tuple[float, float, float], ...]
    turns: tuple[float, ...]
    ink: tuple[int, int, int]
    paper: tuple[int, int, int]

    @property
    def count(self) -> int:
        return len(self.circles)

    @property
    def words(self) -> str:
        """ "three red stars"."""
        return f"{NUMBERS[self.count - 1]} {self.colour} {plural(self.shape) if self.count > 1 else self.shape}"


def plural(shape: str) -> str:
    return f"{shape}es" if shape.endswith("s") else f"{shape}s"


def random_scene(rng: random.Random, size: tuple[int, int] | None = None) -> Scene:
    """Return a scene with every colour, shape and count as likely as the others; its sides are `size` times a scale."""
    colour, shape, count = rng.choice(tuple(COLOURS)), rng.choice(SHAPES), rng.randint(1, len(NUMBERS))
    scale = rng.uniform(*SCALES)
    width, height = (round(side * scale) for side in size or rng.choice(SIZES))
    grey = 1.0 if rng.random() < 0.3 else rng.uniform(0.86, 1.0)
    paper = (255, 255, 255) if grey == 1.0 else _rgb(rng.random(), rng.uniform(0.0, 0.06), grey)
    turn = rng.uniform(-20, 20) if shape != "bar" else rng.uniform(0, 180)
    turns = tuple(turn + rng.uniform(-12, 12) for _ in range(count))
    return Scene(colour, shape, width, height, _places(rng, count, width, height), turns, _ink(rng, colour), paper)


def _ink(rng: random.Random, colour: str) -> tuple[int, int, int]:
    (hue, spread), saturation, value = COLOURS[colour]
    return _rgb((hue + rng.uniform(-spread, spread)) / 360 % 1, rng.uniform(*saturation), rng.uniform(*value))


def _rgb(hue: float, saturation: float, value: float) -> tuple[int, int, int]:
    red, green, blue = colorsys.hsv_to_rgb(hue, saturation, value)
    return round(255 * red), round(255 * green), round(255 * blue)


def _places(rng: random.Random, count: int, width: int, height: int) -> tuple[tuple[float, float, float], ...]:
    """Return circles that lie inside the picture and apart from each other. Where they find no room, they shrink."""
    side = min(width, height)
    radius = side * rng.uniform(0.13, min(0.3, 0.38 / math.sqrt(count)))
    found: list[tuple[float, float, float]] = []
    while len(found) < count:
        r = radius * rng.uniform(0.88, 1.0)
        for _ in range(30):
            x, y = rng.uniform(1.05 * r, width - 1.05 * r), rng.uniform(1.05 * r, height - 1.05 * r)
            if all(math.hypot(x - a, y - b) > 1.1 * (r + c) for a, b, c in found):
                found.append((x, y, r))
                break
        else:
            found, radius = [], 0.93 * radius
    return tuple(found)


def draw(scene: Scene) -> Image.Image:
    """Return the picture, RGB, with smooth edges."""
    picture = Image.new("RGB", (_SMOOTH * scene.width, _SMOOTH * scene.height), scene.paper)
    pen = ImageDraw.Draw(picture)
    for (x, y, r), turn in zip(scene.circles, scene.turns, strict=True):
        _one(pen, scene.shape, (_SMOOTH * x, _SMOOTH * y, _SMOOTH * r), math.radians(turn), scene.ink)
    return picture.reduce(_SMOOTH)


def _one(
    pen: ImageDraw.ImageDraw, shape: str, circle: tuple[float, float, float], turn: float, ink: tuple[int, int, int]
) -> None:
    x, y, r = circle
    box = (x - r, y - r, x + r, y + r)
    if shape == "circle":
        pen.ellipse(box, fill=ink)
    elif shape == "ring":
        pen.ellipse(box, outline=ink, width=round(0.36 * r))
    else:
        sin, cos = math.sin(turn), math.cos(turn)
        pen.polygon([(x + r * (a * cos - b * sin), y + r * (a * sin + b * cos)) for a, b in OUTLINES[shape]], fill=ink)


def _rays(count: int, *radii: float) -> list[Point]:
    """Return points around the centre, the first of them on top, at these distances in turn."""
    angles = [2 * math.pi * number / count for number in range(count)]
    return [(radii[n % len(radii)] * math.sin(a), -radii[n % len(radii)] * math.cos(a)) for n, a in enumerate(angles)]


def _plus(long: float, thin: float) -> list[Point]:
    corner = [(thin, long), (thin, thin), (long, thin)]
    quarters = [corner, [(a, -b) for a, b in reversed(corner)]]
    half = [point for quarter in quarters for point in quarter]
    return half + [(-a, -b) for a, b in half]


OUTLINES: dict[str, list[Point]] = {
    "triangle": _rays(3, 1.0),
    "star": _rays(10, 1.0, 0.42),
    "cross": _plus(0.95, 0.28),
    "bar": [(1.0, 0.24), (1.0, -0.24), (-1.0, -0.24), (-1.0, 0.24)],
}


def png(picture: Image.Image) -> bytes:
    """Return the picture as the bytes of a PNG file."""
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(f"pictures {args.seed}")
    for number in range(1, args.count + 1):
        scene = random_scene(rng)
        (args.folder / f"{number}-{scene.words.replace(' ', '-')}.png").write_bytes(png(draw(scene)))


if __name__ == "__main__":
    main()
