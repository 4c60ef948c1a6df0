"""Converts Markdown to HTML, with any HTML in it escaped."""

import re

from markdown_it import MarkdownIt
from markupsafe import Markup

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
