"""HTML from nested calls. What comes from files is escaped by default, never by remembering to."""

from html import escape

VOID = ("br", "col", "hr", "img", "input", "link", "meta")


class Html(str):
    """Text that is markup already; a plain str is data and gets escaped."""


def tag(element: str, /, *children: str | None, **attributes: str | float | bool | None) -> Html:
    """One element. `class_` and `data_value` stand for class and data-value.

    Attributes that are None or False and children that are None are left out; an attribute that is
    True has no value.
    """
    words = [element]
    for key, value in attributes.items():
        key = key.rstrip("_").replace("_", "-")
        if value is True:
            words.append(key)
        elif value is not None and value is not False:
            words.append(f'{key}="{escape(str(value))}"')
    opening = f"<{' '.join(words)}>"
    return Html(opening if element in VOID else f"{opening}{join(*children)}</{element}>")


def join(*children: str | None) -> Html:
    """Children one after the other, each escaped unless it is markup."""
    parts = (c if isinstance(c, Html) else escape(c) for c in children if c is not None)
    return Html("".join(parts))


def code(text: str) -> Html:
    return tag("code", text)


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
