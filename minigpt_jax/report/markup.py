"""Markdown that shows foreign text literally, and the self-contained HTML page made from it."""

import base64
import html
import re
from collections.abc import Mapping
from typing import Any

import markdown

# What could mean something within a line. Entities never mean structure, neither to CommonMark nor
# to Python-Markdown; what is harmless stays as it is, for those who read the Markdown itself.
_SPECIAL = re.compile(r'[\\`*|~$&]|<(?! )|\](?=[(\[:])|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])')


def literal(text: Any) -> str:
    """Text from outside within a line of Markdown: it shows as it is and means nothing."""
    line = _printable(' '.join(str(text).split()))
    return _SPECIAL.sub(lambda match: f'&#{ord(match[0])};', line)


def fenced(text: str) -> str:
    """Text from outside as a block of code, in a fence longer than any that it holds."""
    longest = max(map(len, re.findall('`+', text)), default=0)
    fence = '`' * max(3, longest + 1)
    return f'{fence}\n{_printable(text).rstrip()}\n{fence}'


def _printable(text: str) -> str:
    """Control characters by their pictures: Python-Markdown uses some of them as its own marks."""
    return re.sub(
        '[\x00-\x08\x0b-\x1f\x7f]',
        lambda match: '␡' if match[0] == '\x7f' else chr(0x2400 + ord(match[0])),
        text.replace('\r\n', '\n'),
    )


def html_page(title: str, text: str, pictures: Mapping[str, bytes]) -> str:
    """One file that needs no other: the Markdown as HTML, pictures inside, own style sheet."""
    body = markdown.markdown(text, extensions=['tables', 'fenced_code', 'sane_lists'])
    for path, data in pictures.items():
        uri = 'data:image/png;base64,' + base64.b64encode(data).decode()
        body = body.replace(f'src="{path}"', f'src="{uri}"')
    return _PAGE.format(title=html.escape(title), style=_STYLE, body=body)


# The policy makes the browser refuse whatever would come from elsewhere.
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
      content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
{style}
</style>
</head>
<body>
{body}
</body>
</html>
"""

_STYLE = """:root { color-scheme: light dark; --text: #1b1f24; --page: #fff; --line: #d5dae0;
  --soft: #f4f6f8; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e3e7eb; --page: #14171a; --line: #3a4149; --soft: #1f2429; }
}
body { margin: 2rem auto; padding: 0 1rem; max-width: 60rem; color: var(--text);
  background: var(--page); font: 1rem/1.55 system-ui, sans-serif; }
p, li { max-width: 46rem; }
p:has(> img) { max-width: none; }
h1, h2, h3 { line-height: 1.25; }
h2 { margin-top: 2.5rem; border-bottom: 1px solid var(--line); padding-bottom: .25rem; }
table { display: block; overflow-x: auto; width: max-content; max-width: 100%;
  border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .7rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { background: var(--soft); }
img { max-width: 100%; background: #fff; border-radius: 4px; }
pre { padding: .8rem 1rem; border-radius: 4px; background: var(--soft); white-space: pre-wrap;
  overflow-wrap: anywhere; font-size: .85rem; }
li { overflow-wrap: anywhere; }"""
