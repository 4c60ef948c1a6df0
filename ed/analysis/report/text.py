"""Markdown and long notes as HTML. Everything from files is escaped."""

import re
from collections.abc import Iterator, Sequence

from markdown_it import MarkdownIt
from markupsafe import Markup

MOST_WORDS = 40  # of one item in a list of notes


# a link to a file beside the Markdown leads nowhere on the page: its text stays
LOCAL_LINK = re.compile(r"!?\[([^\]]*)\]\((?!https?://)[^)]*\)")
PARSER = MarkdownIt("commonmark", {"html": False}).enable("table").disable("image")
# wide tables scroll in a box of their own, which the keyboard can reach
BOX = '<div class="wide" tabindex="0" role="region" aria-label="table"><table>'
PARSER.add_render_rule("table_open", lambda *_: BOX)
PARSER.add_render_rule("table_close", lambda *_: "</table></div>")


def markdown(text: str) -> Markup:
    """Whole documents; headings go one level down, as the page has its own first one."""
    tokens = PARSER.parse(LOCAL_LINK.sub(r"\1", text))
    for token in tokens:
        if token.type.startswith("heading"):
            token.tag = f"h{min(6, int(token.tag[1]) + 1)}"
    return Markup(PARSER.renderer.render(tokens, PARSER.options, {}))


def inline(text: str) -> Markup:
    """Code, emphasis and links within a line."""
    return Markup(PARSER.renderInline(LOCAL_LINK.sub(r"\1", text)))


def items(notes: Sequence[str]) -> Iterator[str]:
    """Notes as list items of at most MOST_WORDS words, cut between sentences."""
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
