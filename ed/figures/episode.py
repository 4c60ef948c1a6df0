"""Draws one episode of a game as an animation (GIF) and as a strip of frames (PNG)."""

import io
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from PIL import Image, ImageDraw, ImageFont

# Procgen's actions: nine directions of a pad, in columns from bottom to top, then six buttons
BUTTONS = ("D", "A", "W", "S", "Q", "E")
DIRECTIONS = ("left down", "left", "left up", "down", "wait", "up")
DIRECTIONS += ("right down", "right", "right up")
NAMES = (*DIRECTIONS, *BUTTONS)

SCALE, STRIP_SCALE = 6, 3  # magnification of the 64 x 64 frames
PANEL = 216  # width in pixels of the panel beside each GIF frame
SHOWN, PER_ROW = 8, 4  # number of frames in the PNG
MOST_FRAMES = 300  # approximate limit for the GIF; longer episodes skip frames
FRAME_MS = 70  # about 15 frames per second, as in the game
PAPER, INK, FAINT = (250, 250, 248), (28, 32, 38), (128, 134, 142)
CELL, FULL, CHOSEN = (233, 235, 236), (31, 94, 148), (214, 118, 30)
_font = ImageFont.load_default  # takes a font size


@dataclass
class Episode:
    """The frames of an episode, with the agent's actions.

    Attributes:
        frames: (3, 64, 64) uint8 each.
        actions, probabilities, rewards: one per frame; probabilities are (15,), and the reward
            follows the action in that frame.
    """

    game: str
    level: int
    frames: list[np.ndarray] = field(default_factory=list)
    actions: list[int] = field(default_factory=list)
    probabilities: list[np.ndarray] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)

    @property
    def total(self) -> float:
        return float(sum(self.rewards))


def gif(episode: Episode) -> bytes:
    """Renders the episode with the return so far and the probability of every action."""
    every = -(-len(episode.frames) // MOST_FRAMES)
    last = len(episode.frames) - 1  # always shown, as it has the final return
    images = [_scene(episode, step) for step in (*range(0, last, every), last)]
    file = io.BytesIO()
    images[0].save(
        file,
        format="GIF",
        save_all=True,
        append_images=images[1:],
        duration=[FRAME_MS] * (len(images) - 1) + [1500],  # hold the last frame
        loop=0,
    )
    return file.getvalue()


def strip(episode: Episode) -> bytes:
    """Renders a few frames, evenly spaced from first to last, four per row."""
    count = min(SHOWN, len(episode.frames))
    steps = np.linspace(0, len(episode.frames) - 1, count).round().astype(int)
    side, gap, top, foot = 64 * STRIP_SCALE, 10, 34, 44
    columns, lines = min(PER_ROW, count), -(-count // PER_ROW)
    size = (columns * (side + gap) + gap, top + lines * (side + foot))
    image = Image.new("RGB", size, PAPER)
    canvas = ImageDraw.Draw(image)
    title = f"{episode.game}, level {episode.level}: return {episode.total:.4g} "
    title += f"in {len(episode.frames)} steps"
    canvas.text((gap, 8), title, fill=INK, font=_font(16))
    for place, step in enumerate(steps):
        line, column = divmod(place, PER_ROW)
        left, upper = gap + column * (side + gap), top + line * (side + foot)
        image.paste(_enlarged(episode.frames[step], STRIP_SCALE), (left, upper))
        action = episode.actions[step]
        earned = sum(episode.rewards[: step + 1])
        text = f"step {step + 1}, return {earned:.4g}\n"
        text += f"{NAMES[action]} ({episode.probabilities[step][action]:.2f})"
        canvas.multiline_text((left, upper + side + 4), text, fill=INK, font=_font(13), spacing=2)
    file = io.BytesIO()
    image.save(file, format="PNG", optimize=True)
    return file.getvalue()


def _scene(episode: Episode, step: int) -> Image.Image:
    side = 64 * SCALE
    image = Image.new("RGB", (side + PANEL, side), PAPER)
    image.paste(_enlarged(episode.frames[step], SCALE), (0, 0))
    canvas, left = ImageDraw.Draw(image), side + 18
    canvas.text((left, 14), episode.game, fill=INK, font=_font(20))
    rows = {"level": str(episode.level), "step": f"{step + 1} of {len(episode.frames)}"}
    rows["return"] = f"{sum(episode.rewards[: step + 1]):.4g}"
    for place, (name, value) in enumerate(rows.items()):
        canvas.text((left, 46 + 20 * place), name, fill=FAINT, font=_font(14))
        canvas.text((left + 56, 46 + 20 * place), value, fill=INK, font=_font(14))
    canvas.text((left, 122), "action probabilities", fill=FAINT, font=_font(13))
    _pad(canvas, (left, 144), episode.probabilities[step], episode.actions[step])
    return image


def _pad(canvas: ImageDraw.ImageDraw, corner: tuple[int, int], chances: Sequence, chosen: int):
    """Draws the directions as a 3 x 3 pad above two rows of buttons; frames the chosen action."""
    cell, gap = 40, 5
    for action, chance in enumerate(chances):
        if action < len(DIRECTIONS):
            column, row = action // 3, 2 - action % 3
        else:
            column, row = (action - len(DIRECTIONS)) % 3, 3 + (action - len(DIRECTIONS)) // 3
        x = corner[0] + column * (cell + gap + 14)
        y = corner[1] + row * (cell + gap) + (8 if row > 2 else 0)
        box = (x, y, x + cell + 12, y + cell)
        mixed = [round(a + (b - a) * float(chance)) for a, b in zip(CELL, FULL, strict=True)]
        outline = CHOSEN if action == chosen else None
        canvas.rounded_rectangle(box, 5, tuple(mixed), outline, width=3)
        ink = PAPER if chance > 0.45 else INK
        middle = ((box[0] + box[2]) / 2, (box[1] + box[3]) / 2)
        label = _arrow(action) if action < len(DIRECTIONS) else BUTTONS[action - len(DIRECTIONS)]
        text = f"{label}\n{chance:.2f}"
        canvas.multiline_text(
            middle, text, fill=ink, font=_font(11), anchor="mm", align="center", spacing=1
        )


def _arrow(action: int) -> str:
    return DIRECTIONS[action].replace("right", "R").replace("left", "L").replace(" ", "+")


def _enlarged(frame: np.ndarray, scale: int) -> Image.Image:
    """Enlarges a frame without smoothing, to show the pixels that the network sees."""
    image = Image.fromarray(np.ascontiguousarray(frame.transpose(1, 2, 0)))
    return image.resize((64 * scale, 64 * scale), Image.Resampling.NEAREST)
