"""The site of the documentation: `sphinx-build -W -c docs . build/site` from the root of the repository.

The source folder is the repository, so that links between pages and to other files lead to the same places on the site
as in the repository: pages are Markdown files and notebooks, every other file that a page links to is copied.
"""

import re

from docutils.nodes import document
from sphinx.application import Sphinx

project = "moba_train"
author = "the moba_train authors"
copyright = "the moba_train authors, Apache License 2.0"
root_doc = "docs/index"
include_patterns = ["docs/**", "*.md", "benchmarks/**.md", "experiments/*.md", "integrations/*/README.md"]
exclude_patterns = ["docs/conf.py", "docs/site"]

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 5  # GitHub's
nb_execution_mode = "off"  # a test runs the notebook, and its outputs are committed
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
autodoc_mock_imports = ["triton"]

html_theme = "furo"
html_title = "moba_train"
html_static_path = ["site/static"]
html_extra_path = ["site/index.html"]  # sends the address of the site to docs/index.html
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False

NOT_SEARCHED = re.compile(r"benchmarks/|experiments/|CHANGELOG")
"""Pages that hold evidence. They would bury what a search is for."""


def leave_out_of_the_search(app: Sphinx, doctree: document) -> None:
    """Mark pages of evidence, which are read by links from other pages."""
    if NOT_SEARCHED.match(app.env.docname):
        app.env.metadata[app.env.docname]["nosearch"] = True


def setup(app: Sphinx) -> None:
    """Sphinx calls this."""
    app.connect("doctree-read", leave_out_of_the_search)
