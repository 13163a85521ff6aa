"""Regenerates images/: small image files, and images.json with the pixels and patches that transformers makes of them.

    python tests/golden/images.py        (transformers 5.24, Pillow 13, torchvision 0.29)

  files     each file, opened as transformers opens images: EXIF orientation, then RGB. Its size, and what the two image
            processors (Pillow and torchvision) make of it with the settings: the grid, and the bytes of the resized image
            in the order of patches (patch, channel, y, x), as base64 of zlib. `far` is the largest difference of the two.
  patches   the float values of the first patches of one file, as base64 of little-endian float32.
  Files of no case are refused, and rows.parquet has rows with images.
  sizes     [height, width, unit, least, most, new height, new width], from smart_resize.
"""

import base64
import io
import json
import pathlib
import struct
import zlib

import numpy as np
from PIL import Image, ImageOps
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize
from transformers import Qwen2VLImageProcessor

OUT = pathlib.Path(__file__).with_suffix("")
pillow_resize = Image.Image.resize


def rows_first(image, size, *more, **options):
    """Pillow's `resize`, rows before columns: as Pillow before 12.3, and torchvision. Pillow 13 begins with the columns if
    the height shrinks by more than twice as many pixels as the width."""
    rows = pillow_resize(image, (size[0], image.height), *more, **options)
    return pillow_resize(rows, size, *more, **options)


Image.Image.resize = rows_first
SETTINGS = {
    "small": {"patch_size": 4, "size": {"shortest_edge": 1024, "longest_edge": 4096}},
    "qwen2_5": {"size": {"shortest_edge": 3136, "longest_edge": 12845056}},
    "qwen3": {"patch_size": 16, "size": {"shortest_edge": 4096, "longest_edge": 65536},
              "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]},
}


def picture(height, width, seed, noise=40):
    """A smooth image with noise, hard edges and full range."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width]
    waves = [127 + 127 * np.sin(x / (3 + c) + y / (5 - c) + c) for c in range(3)]
    image = np.stack(waves, -1) + rng.normal(0, noise, (height, width, 3))
    image[height // 3:height // 2, width // 4:width // 2] = (255, 0, 128)
    return np.clip(image, 0, 255).astype(np.uint8)


def files():
    """Name of the file, image, options of saving, settings."""
    rgb = Image.fromarray(picture(37, 61, 1))
    alpha = rgb.copy()
    alpha.putalpha(Image.fromarray(picture(37, 61, 2)[..., 0]))
    smooth = Image.fromarray(picture(45, 70, 5, noise=4))
    yield "rgb.png", rgb, {}, "small"
    yield "rgba.png", alpha, {}, "small"
    yield "gray.png", rgb.convert("L"), {}, "small"
    yield "gray-alpha.png", alpha.convert("LA"), {}, "small"
    yield "bits.png", rgb.convert("1"), {}, "small"
    yield "palette.png", rgb.quantize(16), {"transparency": 3}, "small"
    yield "interlaced.png", None, {}, "small"
    yield "deep.png", None, {}, "small"
    yield "tiny.png", Image.fromarray(picture(5, 3, 3)), {}, "qwen2_5"
    yield "equal.png", Image.fromarray(picture(32, 64, 4)), {}, "small"
    yield "large.png", Image.fromarray(picture(201, 126, 6, noise=2)), {}, "small"
    yield "narrow.png", Image.fromarray(picture(4, 250, 7)), {}, "qwen3"
    yield "444.jpg", smooth, {"quality": 92, "subsampling": 0}, "qwen3"
    yield "422.jpg", smooth, {"quality": 92, "subsampling": 1}, "qwen3"
    yield "420.jpg", smooth, {"quality": 75, "subsampling": 2}, "qwen3"
    yield "progressive.jpg", smooth, {"quality": 80, "progressive": True}, "qwen3"
    for height, width, sampling, more in [(17, 33, 2, {}), (33, 50, 1, {}), (3, 5, 2, {}), (1, 1, 2, {}), (50, 2, 2, {}),
                                          (48, 65, 2, {"progressive": True}), (41, 31, 1, {"progressive": True}),
                                          (40, 72, 2, {"restart_marker_blocks": 3}), (31, 47, 0, {"keep_rgb": True})]:
        image = Image.fromarray(picture(height, width, 11, noise=30 * (width % 2)))
        yield (f"{height}x{width}.jpg", image, {"subsampling": sampling, "quality": 60, **more}, "small")
    yield "gray.jpg", smooth.convert("L"), {"quality": 92}, "qwen3"
    for turn in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = turn
        yield f"turned-{turn}.jpg", Image.fromarray(picture(40, 24, 8, noise=0)), {
            "exif": exif, "quality": 90, "subsampling": 0}, "small"
    exif = Image.Exif()
    exif[0x0112] = 6
    yield "turned-420.jpg", smooth, {"exif": exif, "quality": 75}, "small"
    yield "turned.png", rgb, {"exif": exif}, "small"


def refused():
    """Files that are refused."""
    rgb = Image.fromarray(picture(8, 8, 1))
    frames = [Image.fromarray(picture(8, 8, i)) for i in (2, 3)]
    rgb.convert("CMYK").save(OUT / "cmyk.jpg")
    for form in ("png", "gif", "webp"):
        rgb.save(OUT / f"animated.{form}", save_all=True, append_images=frames, duration=100)
    rgb.save(OUT / "still.webp")
    rgb.save(OUT / "still.bmp")
    Image.fromarray(np.full((4, 4), 300, np.uint16)).save(OUT / "gray-16.png")


def parquet():
    """Rows whose images are in the file, as Dataset.to_parquet writes them."""
    import datasets
    bytes_of = lambda name: {"bytes": (OUT / name).read_bytes(), "path": name}
    rows = {"prompt": ["What is this?", "<image> or <image>?"], "answer": ["a", "b"],
            "images": [[bytes_of("rgb.png")], [bytes_of("420.jpg"), {"bytes": None, "path": "tiny.png"}]]}
    images = datasets.List({"bytes": datasets.Value("binary"), "path": datasets.Value("string")})
    text = datasets.Value("string")
    features = datasets.Features({"prompt": text, "answer": text, "images": images})
    datasets.Dataset.from_dict(rows, features=features).to_parquet(OUT / "rows.parquet")


def png(width, height, depth, kind, rows, interlaced=False):
    """A PNG file of raw rows, for forms that Pillow does not write."""
    chunk = lambda name, data: struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
    header = struct.pack(">IIBBBBB", width, height, depth, kind, 0, 0, int(interlaced))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def special(name):
    if name == "deep.png":
        rng = np.random.default_rng(9)
        pixels = rng.integers(0, 65536, (20, 28, 3)).astype(">u2")
        return png(28, 20, 16, 2, b"".join(b"\0" + row.tobytes() for row in pixels))
    pixels = picture(21, 30, 10)
    rows = b""
    for y0, dy, x0, dx in [(0, 8, 0, 8), (0, 8, 4, 8), (4, 8, 0, 4), (0, 4, 2, 4), (2, 4, 0, 2), (0, 2, 1, 2), (1, 2, 0, 1)]:
        part = pixels[y0::dy, x0::dx]
        rows += b"".join(b"\0" + row.tobytes() for row in part) if part.size else b""
    return png(30, 21, 8, 2, rows, True)


def opened(data):
    """As load_image of transformers, which drops alpha. A transparent color that a palette names would stay in `info`."""
    return Image.fromarray(np.array(ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")))


def bytes_of(processor, image):
    """The grid, the resized bytes in the order of patches, and the values."""
    found = processor(image, return_tensors="np")
    values = np.asarray(found["pixel_values"], np.float64)
    patch, frames = processor.patch_size, processor.temporal_patch_size
    cut = values.reshape(len(values), 3, frames, patch, patch)
    assert (cut[:, :, 0] == cut[:, :, 1]).all()
    mean, std = (np.array(x).reshape(1, 3, 1, 1) for x in (processor.image_mean, processor.image_std))
    raw = (cut[:, :, 0] * std + mean) * 255
    assert abs(raw - raw.round()).max() < 0.01
    return np.asarray(found["image_grid_thw"])[0].tolist(), raw.round().astype(np.uint8), values.astype("<f4")


def main():
    OUT.mkdir(exist_ok=True)
    golden = {"settings": SETTINGS, "files": [], "sizes": []}
    text = lambda data: base64.b64encode(data).decode()
    for name, image, options, settings in files():
        path = OUT / name
        if image is None:
            path.write_bytes(special(name))
        else:
            image.save(path, **options)
        image = opened(path.read_bytes())
        grid, pixels, values = bytes_of(Qwen2VLImageProcessorPil(**SETTINGS[settings]), image)
        other_grid, other, _ = bytes_of(Qwen2VLImageProcessor(**SETTINGS[settings]), image)
        assert grid == other_grid
        far = int(abs(pixels.astype(int) - other).max())
        golden["files"].append({"name": name, "settings": settings, "height": image.height, "width": image.width,
                                "grid": grid, "far": far, "pixels": text(zlib.compress(pixels.tobytes(), 9))})
        if name == "equal.png":
            golden["patches"] = {"name": name, "values": text(values[:5].tobytes())}
        print(name, image.size, grid, "far", far)
    refused()
    parquet()
    rng = np.random.default_rng(0)
    for i in range(400):
        height, width = (int(x) for x in np.exp(rng.uniform(0, 8, 2)).round())
        unit, least, most = [(28, 3136, 12845056), (32, 65536, 16777216), (28, 3136, 1003520), (16, 1024, 4096)][i % 4]
        if max(height, width) / min(height, width) <= 200:
            new = smart_resize(height, width, unit, least, most)
            golden["sizes"].append([height, width, unit, least, most, *new])
    lines = ",\n".join(json.dumps(one) for one in golden["files"])
    rest = {key: value for key, value in golden.items() if key != "files"}
    OUT.with_suffix(".json").write_text(json.dumps(rest)[:-1] + ', "files": [\n' + lines + "\n]}\n")


if __name__ == "__main__":
    main()
