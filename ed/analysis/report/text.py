"""Markdown and long notes as HTML. Everything from files is escaped."""

import re
from collections.abc import Iterator, Sequence

from markdown_it import MarkdownIt
from markdown_it.token import Token
from markupsafe import Markup

MOST_WORDS = 40  # of one item in a list of notes


def _parser() -> MarkdownIt:
    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    # wide tables scroll in a box of their own, which the keyboard can reach
    opening = '<div class="wide" tabindex="0" role="region" aria-label="table"><table>'
    parser.add_render_rule("table_open", lambda *_: opening)
    parser.add_render_rule("table_close", lambda *_: "</table></div>")
    parser.core.ruler.push("own_links", lambda state: _drop_local_links(state.tokens))
    return parser


def _drop_local_links(tokens: list[Token]) -> None:
    """Keeps links to the web; of others the text, as nothing lies beside the page."""
    for block in tokens:
        kept, inside = [], []
        for token in block.children or []:
            if token.type == "link_open":
                inside.append(str(token.attrs["href"]).startswith(("https://", "http://")))
            drop = token.type in ("link_open", "link_close") and not inside[-1]
            if token.type == "link_close":
                inside.pop()
            if not drop and token.type != "image":
                kept.append(token)
        if block.children is not None:
            block.children = kept


PARSER = _parser()


def markdown(text: str) -> Markup:
    """Whole documents; headings go one level down, as the page has its own first one."""
    tokens = PARSER.parse(text)
    for token in tokens:
        if token.type.startswith("heading"):
            token.tag = f"h{min(6, int(token.tag[1]) + 1)}"
    return Markup(PARSER.renderer.render(tokens, PARSER.options, {}))


def inline(text: str) -> Markup:
    """Code, emphasis and links within a line."""
    return Markup(PARSER.renderInline(text))


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
