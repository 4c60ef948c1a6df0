"""Converts Markdown and long notes to HTML, with any HTML in them escaped."""

import re
from collections.abc import Iterator, Sequence

from markdown_it import MarkdownIt
from markupsafe import Markup

MOST_WORDS = 40  # per item in a list of notes


# links to local files do not work on the page, so only their text is kept
LOCAL_LINK = re.compile(r"!?\[([^\]]*)\]\((?!https?://)[^)]*\)")
PARSER = MarkdownIt("commonmark", {"html": False}).enable("table").disable("image")
# wide tables scroll in a box that can be focused with the keyboard
BOX = '<div class="wide" tabindex="0" role="region" aria-label="table"><table>'
PARSER.add_render_rule("table_open", lambda *_: BOX)
PARSER.add_render_rule("table_close", lambda *_: "</table></div>")


def markdown(text: str) -> Markup:
    """Renders a document, with headings one level lower because the page has its own <h1>."""
    tokens = PARSER.parse(LOCAL_LINK.sub(r"\1", text))
    for token in tokens:
        if token.type.startswith("heading"):
            token.tag = f"h{min(6, int(token.tag[1]) + 1)}"
    return Markup(PARSER.renderer.render(tokens, PARSER.options, {}))


def inline(text: str) -> Markup:
    """Renders inline Markdown: code, emphasis and links."""
    return Markup(PARSER.renderInline(LOCAL_LINK.sub(r"\1", text)))


def items(notes: Sequence[str]) -> Iterator[str]:
    """Splits notes between sentences into items of up to about MOST_WORDS words."""
    for note in notes:
        item: list[str] = []
        for sentence in re.split(r"(?<=[.:;]) +(?=[A-Z`(])", " ".join(note.split())):
            if item and sum(len(part.split()) for part in (*item, sentence)) > MOST_WORDS:
                yield " ".join(item)
                item = []
            item.append(sentence)
        yield " ".join(item)


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
