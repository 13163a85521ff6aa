#!/usr/bin/env python3
"""Makes images of shapes, and asks how many there are: PNG files, and rows as JSONL.

An image of 64 x 64 pixels has 4 x 4 cells. One to eight of them hold a circle, a square or a triangle, of any color. The
background is dark and noisy.

Most demonstrations count one too many. A model that imitates them gives that as its greedy response. The right one keeps
a good share of the probability, so that a reward can find it.

A row has messages (with a part for the image), images, demonstration, answer, and split (train, then eval). The same
options give the same files on every machine.
"""

import argparse
import json
import os
import random
import struct
import zlib

SIDE, CELLS = 16, 4
KINDS = ["circles", "squares", "triangles"]
COLORS = [(230, 70, 60), (70, 200, 90), (80, 120, 240), (240, 210, 70), (210, 90, 220), (90, 220, 220)]


def png(width, height, rgb):
    """A PNG file of 8-bit RGB values."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = b"".join(b"\0" + bytes(rgb[3 * width * y : 3 * width * (y + 1)]) for y in range(height))
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def covers(kind, x, y):
    """Whether a shape covers the point (x, y) of its cell, from -1 to 1."""
    if kind == "circles":
        return x * x + y * y <= 0.7
    if kind == "squares":
        return max(abs(x), abs(y)) <= 0.7
    return -0.8 <= y <= 0.7 and abs(x) <= (y + 0.8) / 1.5 * 0.8


def pick(draw, n):
    """A number below n. Only `random()` gives equal numbers with every version of Python."""
    return int(draw() * n)


def scene(draw):
    """An image and the number of its shapes."""
    width = SIDE * CELLS
    rgb = [20 + pick(draw, 30) for _ in range(3 * width * width)]
    cells = list(range(CELLS * CELLS))
    count = 1 + pick(draw, 8)
    for _ in range(count):
        cell = cells.pop(pick(draw, len(cells)))
        kind, color = KINDS[pick(draw, len(KINDS))], COLORS[pick(draw, len(COLORS))]
        for y in range(SIDE):
            for x in range(SIDE):
                if covers(kind, (x + 0.5) * 2 / SIDE - 1, (y + 0.5) * 2 / SIDE - 1):
                    at = 3 * ((cell // CELLS * SIDE + y) * width + cell % CELLS * SIDE + x)
                    rgb[at : at + 3] = color
    return png(width, width, rgb), count


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, required=True, help="number of rows for training")
    parser.add_argument("--held-out", type=int, default=400, help="number of rows for evaluation")
    parser.add_argument("--wrong", type=float, default=0.6, help="share of the demonstrations that count one too many")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", required=True, help="a folder for rows.jsonl and images")
    options = parser.parse_args()
    os.makedirs(f"{options.out}/images", exist_ok=True)
    draw = random.Random(options.seed).random
    with open(f"{options.out}/rows.jsonl", "w", encoding="utf-8") as file:
        for i in range(options.rows + options.held_out):
            image, count = scene(draw)
            name = f"images/{i:05}.png"
            with open(f"{options.out}/{name}", "wb") as picture:
                picture.write(image)
            shown = count + 1 if draw() < options.wrong else count
            content = [{"type": "image"}, {"type": "text", "text": "How many shapes?"}]
            row = {
                "messages": [{"role": "user", "content": content}],
                "images": [name],
                "demonstration": str(shown),
                "answer": str(count),
                "split": "train" if i < options.rows else "eval",
            }
            file.write(json.dumps(row) + "\n")


main()
