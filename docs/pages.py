"""Pages of the site that lie elsewhere in the tree: beside the code that they are about.

mkdocs calls `on_files` when it has found the pages of docs/, and `on_page_markdown` for each page.
Links between pages are kept, wherever the pages lie; a link to a file that is no page becomes the
words of the link.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
#: A file of the tree, and where it is in the site.
PAGES = {
    "client/README.md": "guides/pytorch.md",
    "deploy/vllm-omni/README.md": "guides/vllm.md",
    "deploy/README.md": "operations/services.md",
    "deploy/kubernetes/README.md": "operations/kubernetes.md",
    "deploy/ray/README.md": "operations/ray.md",
    "deploy/watching.md": "operations/watching.md",
    "swapd/log/README.md": "operations/log.md",
    "swapd/core/README.md": "core.md",
    "benchmarks/README.md": "performance.md",
    "tests/offload/zoo/README.md": "models.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security-policy.md",
}
#: Folders whose README is a page are linked to by their own names, too.
FOLDERS = {posixpath.dirname(path): page for path, page in PAGES.items() if path.endswith("ME.md")}
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]*)(#[^)\s]*)?\)")
_FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of `PAGES` to those of docs/."""
    for source, page in PAGES.items():
        content = moved((ROOT / source).read_text(), source, page)
        files.append(File.generated(config, page, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The pages of docs/ link to files as they lie in the tree, too."""
    path = page.file.src_uri
    return markdown if path in PAGES.values() else moved(markdown, f"docs/{path}", path)


def moved(text: str, source: str, page: str) -> str:
    """The text of a file with its links as they are from `page`; code is left alone."""

    def link(found: re.Match[str]) -> str:
        image, words, target, anchor = found.groups()
        if not target or "://" in target:
            return found[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        to = PAGES.get(path) or FOLDERS.get(path) or _of_docs(path)
        if to is None:
            return words
        relative = posixpath.relpath(to, posixpath.dirname(page) or ".")
        return f"{image}[{words}]({relative}{anchor or ''})"

    parts, at = [], 0
    for code in _FENCED.finditer(text):
        parts += [_LINK.sub(link, text[at : code.start()]), code[0]]
        at = code.end()
    return "".join([*parts, _LINK.sub(link, text[at:])])


def _of_docs(path: str) -> str | None:
    if path == "README.md":
        return "index.md"
    return path.removeprefix("docs/") if path.startswith("docs/") else None
