"""Embeds images in the page, small enough for a phone."""

import base64
import io
from pathlib import Path
from typing import NamedTuple

from PIL import Image

KINDS = (".png", ".svg")
MOST_PIXELS = 1440  # maximum width; most figures have it
PER_INCH = 133  # pixels per inch of a figure, so that text has the same size in all figures
QUALITY = 78
COLOURS = 64  # of images that have a palette: figures, which look the same with fewer colours


class Embedded(NamedTuple):
    """An embedded image: its data URI, and its size on the page if known."""

    source: str
    width: int | None = None
    height: int | None = None


def embed(path: Path) -> Embedded:
    """Embeds an image file. PNG becomes WebP, which is much smaller; SVG stays as it is.

    An SVG in an <img> element cannot run scripts.
    """
    if path.suffix.lower() == ".svg":
        return Embedded(_uri("image/svg+xml", path.read_bytes()))
    try:
        with Image.open(path) as image:
            dots, _ = image.info.get("dpi", (PER_INCH, PER_INCH))
            width = round(image.width * PER_INCH / dots)
            has_palette = image.mode == "P"
            image = image.convert("RGB")
    except OSError as error:
        raise ValueError(f"{path} is not an image ({error}); restore the file") from None
    if image.width > MOST_PIXELS:
        height = round(image.height * MOST_PIXELS / image.width)
        image = image.resize((MOST_PIXELS, height), Image.Resampling.LANCZOS)
    flat = image.quantize(COLOURS, dither=Image.Dither.NONE) if has_palette else image
    ways = _webp(image, quality=QUALITY), _webp(flat.convert("RGB"), lossless=True)
    width = min(width, image.width)
    height = round(width * image.height / image.width)
    return Embedded(_uri("image/webp", min(ways, key=len)), width, height)


def _webp(image: Image.Image, **settings) -> bytes:
    file = io.BytesIO()
    image.save(file, "WEBP", method=4, **settings)
    return file.getvalue()


def _uri(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def image_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*") if path.suffix.lower() in KINDS)
