"""The Markdown of our own result files: headings, paragraphs, lists, tables, code, bold, links."""

import re

from ed.analysis.report.markup import Html, code, join, tag
from ed.analysis.report.sortable import sortable

INLINE = re.compile(r"`([^`]+)`|\*\*([^*]+)\*\*|\[([^\]]+)\]\(([^)]+)\)")
HEADING = re.compile(r"(#{1,6}) +(.*)")
RULE = re.compile(r"\|?[\s:|-]*-[\s:|-]*\|?")


def render_markdown(text: str) -> Html:
    """Blocks are what blank lines separate; a level-1 heading becomes <h2>."""
    blocks = [block.splitlines() for block in re.split(r"\n\s*\n", text.strip())]
    return join(*map(_block, blocks))


def inline(text: str) -> Html:
    """Code, bold and links within a line. Links that leave the page keep only their text, unless
    they lead to the web: what lies beside the Markdown file does not lie beside the page."""
    parts: list[str] = []
    place = 0
    for match in INLINE.finditer(text):
        parts.append(text[place : match.start()])
        parts.append(_inline_element(match))
        place = match.end()
    return join(*parts, text[place:])


def _inline_element(match: re.Match) -> Html:
    literal, bold, label, target = match.groups()
    if literal is not None:
        return code(literal)
    if bold is not None:
        return tag("strong", bold)
    if target.startswith(("https://", "http://")):
        return tag("a", label, href=target, rel="noopener")
    return join(label)


def _block(lines: list[str]) -> Html:
    heading = HEADING.fullmatch(lines[0])
    if heading:
        level = min(6, len(heading[1]) + 1)
        rest = _block(lines[1:]) if lines[1:] else None
        return join(tag(f"h{level}", inline(heading[2])), rest)
    if lines[0].startswith("|") and len(lines) > 1 and RULE.fullmatch(lines[1]):
        return _table(lines)
    if all(line.startswith(("- ", "  ")) for line in lines):
        items = re.split(r"^- ", "\n".join(lines), flags=re.MULTILINE)[1:]
        return tag("ul", *(tag("li", inline(" ".join(item.split()))) for item in items))
    return tag("p", inline(" ".join(lines)))


def _table(lines: list[str]) -> Html:
    header, *body = [_fields(line) for line in lines if not RULE.fullmatch(line)]
    rows = [[(inline(field), _sort_key(field)) for field in row] for row in body]
    return sortable([inline(name) for name in header], rows)


def _fields(line: str) -> list[str]:
    fields = re.split(r"(?<!\\)\|", line.strip().removeprefix("|").removesuffix("|"))
    return [field.strip().replace("\\|", "|") for field in fields]


def _sort_key(field: str) -> float | str:
    number = re.fullmatch(r"([-+]?[\d,]*\.?\d+)( ?%)?", field)
    return float(number[1].replace(",", "")) if number else field
